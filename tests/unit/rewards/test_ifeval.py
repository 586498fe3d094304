"""Instructions that a program verifies. Every verdict here was decided by reading the response."""

import sys
import types

import pytest

from relax_hpc.environments.rewards import instruction_rules as rules
from relax_hpc.environments.rewards.functions import ifbench, ifeval
from relax_hpc.environments.rewards.instruction_rules import LANGUAGES, RULES, follows
from relax_hpc.errors import ConfigError

PAIRS = [
    ("keywords:existence", {"keywords": ["Tea", "cup"]}, "A teapot and a CUP.", "A teapot, a mug."),
    ("keywords:frequency", {"keyword": "ant", "frequency": 3, "relation": "at least"},
     "Ant, ant and ANT.", "Ant and ant."),
    ("keywords:forbidden_words", {"forbidden_words": ["rain", "sun"]}, "It rained. Sunny!",
     "The Sun."),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 3, "let_relation": "at least"},
     "Eleven men", "Some men"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One.\n***\nTwo.",
     "One.\n\nTwo."),
    ("length_constraints:number_words", {"num_words": 5.0, "relation": "less than"},
     "one - two - three", "one two three four five"),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"},
     "Who? Me! Yes.", "A heading\n\nand a line without an end. So\n\nit is."),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"},
     "Dr. Who paid 3.50 to Mr. B. Smith, e.g. in coins. Fine.", "Who? Me! Yes."),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "however"}, "Yes.\n\n*However*, no.",
     "Yes.\n\nHowever, no.\n\nSo."),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\n\nP.S. Write!",
     "Bye.\nP.S.\n"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [street]",
     "[name], [] and [x"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "So:\n* one\n  - two",
     "**bold**\n-5 degrees"),
    ("detectable_format:title", {}, "<<A day>>\nIt rained.", "<A day>\n<< >>\n<<a\nb>>"),
    ("detectable_format:constrained_response", {}, "Well. My answer is maybe.",
     "My answer is yes. My answer is no."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* **two**",
     "**one** ** ** * *"),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
     "SECTION 1\nOne.\n## SECTION 2\nTwo.", "SECTION 1\nIn SECTION 2 you read\nSECTION 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1, null]}\n```', '{"a": NaN}'),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Why is it so? "}, "why is it so? As..",
     "You ask: Why is it so?"),
    ("combination:two_responses", {}, "One.\n******\nTwo.", "One.\n******\nOne."),
    ("change_case:english_capital", {}, "THIS IS THE END, NO. 1!", "DAS IST NICHT DER WEG UND ICH"),
    ("change_case:english_lowercase", {}, "it is as it was, no. 1", "it is as It was"),
    ("change_case:capital_word_frequency", {"capital_frequency": 3, "capital_relation": "at least"},
     "I SAID X-RAY", "I SAID x-ray"),
    ("startend:end_checker", {"end_phrase": "That is all."}, 'Well. "THAT is all."\n',
     "That is all. Bye!"),
    ("startend:quotation", {}, ' "All of it." ', '"Part" of it'),
    ("punctuation:no_comma", {}, "No; none.", "Yes, one."),
]  # fmt: skip
SAID = {
    "en": "The weather is fine and we are going to walk along the river with our friends.",
    "es": "El tiempo es muy bueno y vamos a pasear por el río con nuestros amigos.",
    "pt": "O tempo não está mau e vamos passear pelo rio com os nossos amigos.",
    "de": "Das Wetter ist schön und wir gehen mit unseren Freunden an den Fluss.",
    "pl": "Pogoda jest ładna i idziemy na spacer nad rzekę, ale nie z przyjaciółmi.",
    "ru": "Погода очень хорошая, и мы идём гулять вдоль реки с друзьями, но это было не так.",
    "uk": "Погода дуже гарна, і ми йдемо гуляти біля річки з друзями, але це було не так.",
    "bg": "Времето е много хубаво и ние ще се разхождаме край реката с приятели, но не сме там.",
    "ar": "الطقس جميل جدا ونحن نمشي على ضفة النهر مع الأصدقاء في هذا اليوم.",
    "fa": "هوا خوب است و ما با دوستان خود در کنار رود راه می رویم که این را دوست داریم.",
    "ur": "موسم اچھا ہے اور ہم دوستوں کے ساتھ دریا کے کنارے سیر کر رہے ہیں۔",
    "hi": "मौसम अच्छा है और हम नदी के किनारे दोस्तों के साथ घूम रहे हैं।",
    "mr": "हवामान छान आहे आणि आम्ही मित्रांसोबत नदीच्या काठावर फिरत आहोत, पण ते नाही.",
    "bn": "আবহাওয়া সুন্দর এবং আমরা নদীর ধারে হাঁটছি।",
    "ko": "날씨가 좋아서 우리는 강을 따라 걷고 있습니다.",
    "ja": "天気がよいので、友達と川沿いを散歩します。",
    "zh": "天气很好，我们和朋友一起沿着河散步。",
}


@pytest.mark.parametrize(("kind", "arguments", "right", "wrong"), PAIRS)
def test_an_instruction_is_followed_or_not(kind, arguments, right, wrong):
    assert follows(right, kind, arguments) is True
    assert follows(wrong, kind, arguments) is False


def test_every_kind_is_there():
    assert {kind for kind, *_ in PAIRS} | {"language:response_language"} == set(RULES)


@pytest.mark.parametrize("language", SAID)
def test_a_sentence_is_in_its_language_and_in_no_other(language):
    found = {
        each
        for each in LANGUAGES
        if follows(SAID[language], "language:response_language", {"language": each})
    }
    assert found == {language}


def test_a_word_of_a_language_does_not_make_a_text_of_it():
    text = "The word 날씨 means weather."
    assert follows(text, "language:response_language", {"language": "en"})
    assert not follows(text, "language:response_language", {"language": "ko"})
    assert not follows("1 + 1 = 2", "language:response_language", {"language": "en"})


@pytest.mark.parametrize("kind", RULES)
def test_an_empty_response_follows_nothing(kind):
    arguments = next((each for name, each, _, _ in PAIRS if name == kind), {"language": "en"})
    assert follows(" \n", kind, arguments) is False


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "babble", ["!" * 2**18 + "a", "Dr. ", "<<a", "<<" + "a" * 2**18, "```json" + " " * 2**18,
               "\n " * 2**17 + "x", "*a", "[a", "-" * 2**18 + "a", "." + " " * 2**18 + "P"],
    ids=lambda babble: ascii(babble[:4]),
)  # fmt: skip
def test_much_babble_takes_no_longer_than_to_read_it_a_few_times(babble):
    text = babble * (2**18 // len(babble) or 1)
    arguments = {kind: each for kind, each, _, _ in PAIRS}
    arguments["language:response_language"] = {"language": "en"}
    assert {kind for kind, each in arguments.items() if follows(text, kind, each)} < set(RULES)


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("keywords:existance", {}, "is not known; there are keywords:existence,"),
        ("keywords:existence", {"keyword": "a"}, r"has kwargs \(keyword\); it takes \(keywords\)"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "about"},
         "relation 'about' is not known"),
    ],
)  # fmt: skip
def test_an_instruction_that_cannot_be_verified_is_an_error(kind, arguments, words):
    with pytest.raises(ValueError, match=words):
        follows("text", kind, arguments)


BOTH = {
    "instruction_id_list": ["punctuation:no_comma", "detectable_format:title"],
    "kwargs": [{"num_words": None, "relation": None}, None],
}


@pytest.mark.parametrize(
    ("response", "prompt", "instruction"),
    [("<<Yes>>", 1, 1), ("yes", 0, 0.5), ("a, b", 0, 0), ("<think>a, b</think><<Yes>>", 1, 1),
     ("<think><<Yes>>", 0, 0), ("<<Yes>></think>a, b", 0, 0)],
)  # fmt: skip
def test_all_instructions_count_or_the_fraction_of_them(response, prompt, instruction):
    assert ifeval.score(response, BOTH) == prompt
    assert ifeval.score(response, BOTH, level="instruction") == instruction


def test_a_line_without_instructions_is_an_error():
    for metadata in (
        {"topic": 1},
        {"instruction_id_list": ["detectable_format:title"], "kwargs": []},
    ):
        with pytest.raises(ValueError, match="instruction_id_list"):
            ifeval.score("text", metadata)


class Shouts:
    """An instruction in the form of the package."""

    def __init__(self, kind):
        self.kind, self.least, self.prompt = kind, None, None

    def build_description(self, *, least=None, prompt=None):
        self.least, self.prompt = least or self.least, prompt

    def get_instruction_args(self):
        return {"least": self.least, "prompt": self.prompt}

    def check_following(self, value):
        return value.count("!") >= self.least and value.startswith(self.prompt)


def test_ifbench_is_asked_in_its_own_form(monkeypatch):
    module = types.ModuleType("ifbench_of_a_test")
    module.INSTRUCTION_DICT = {"count:shouts": Shouts}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    ifbench.check(registry=module.__name__)
    metadata = {
        "instruction_id_list": 2 * ["count:shouts"],
        "kwargs": [{"least": 1, "N": None}, {"least": 3}],
    }
    for prompt in ("Hey", [{"role": "system", "content": "x"}, {"role": "user", "content": "Hey"}]):
        given = {"metadata": metadata, "prompt": prompt, "registry": module.__name__}
        assert ifbench.score("<think>!!!</think>Hey!!", **given) == 0
        assert ifbench.score("Hey!!", **given, level="instruction") == 0.5
        assert ifbench.score("Hey!!!", **given) == 1
        assert ifbench.score("Ho!!!", **given) == 0
    metadata["instruction_id_list"][0] = "count:whispers"
    with pytest.raises(ValueError, match="'count:whispers' is not known to ifbench_of_a_test"):
        ifbench.score("Hey", **given)


def test_ifbench_is_refused_where_it_is_not_installed():
    with pytest.raises(ConfigError, match=r"'no_such_ifbench.*cannot be imported"):
        ifbench.check(registry="no_such_ifbench.instructions_registry")


def test_a_quotation_around_all_hides_no_beginning_of_a_line():
    """R7: sections, a postscript and bullets stand behind its opening mark."""
    assert rules.has_sections('"SECTION 1: a\n\nSECTION 2: b"', "SECTION", 2)
    assert rules.has_postscript('"P.S. It rains."', "P.S.")
    assert rules.has_bullets('"* a\n* b"', 2) and rules.has_bullets('"a" - b\n- c', 1)


@pytest.mark.parametrize(
    ("text", "count"),
    [("Steps:\n1. do this.\n2. do that.", 2), ("1. a b. 2. c d.", 2), ("1.1. Go.\n1.2. Stay.", 2),
     ("**1.** Go.\n**2.** Stay.", 2), ("ii. Go.\n\niii. Stay.", 2), ("It is 5. He is 6.", 2),
     ("It is:\n42.", 1), ("1. In D.C.\n2. In 2021.", 2), ("Pears, etc.\n\nWe left.", 2)],
)  # fmt: skip
def test_the_number_of_an_item_is_no_sentence(text, count):
    """R7: else numbering alone would make as many sentences as are asked for."""
    assert rules.has_sentences(text, count, "at least")
    assert rules.has_sentences(text, count + 1, "less than")


@pytest.mark.parametrize(
    ("kind", "arguments", "text", "followed"),
    [
        ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"},
         "<<Roads>>\n\nAxles are heavy.\n\n**Day 1**\n\nRoads wear.", True),
        ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"},
         "Dear Jake,\n\nI am well.\n\nBest regards,\n\n[Name]", False),
        ("detectable_content:postscript", {"postscript_marker": "P.S."},
         'How about "The Sun"? P.S. Keep it up.', True),
        ("detectable_content:postscript", {"postscript_marker": "P.P.S"},
         "I am well.** *P.P.S: Write!", True),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "See P.S. below.", False),
        ("detectable_format:title", {}, "<<Life -> Death>>\na", True),
        ("detectable_format:title", {}, "<<<< >>>>", False),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2},
         "* * *Sit*\n* * *\n* * *Stay*", True),
        ("change_case:english_capital", {}, "OPTION A IS A BETTER WAY", True),
        ("language:response_language", {"language": "bn"},
         "Google Maps-এ ভিউ যোগ করা হয়েছে। AI-চালিত LaMDA 2 মডেল দেখানো হয়েছে।", True),
        ("language:response_language", {"language": "it"},
         "Yacht sulla riva\nNotti tranquille stelle\nOnde incantano", True),
    ],
)  # fmt: skip
def test_what_other_models_write_is_judged_as_a_reader_does(kind, arguments, text, followed):
    """R7: responses of public models that the rules and IFEval's own program told differently."""
    assert follows(text, kind, arguments) is followed
