"""Verifies the 25 kinds of instruction of IFEval (arXiv:2311.07911, table 1).

Each rule is written from the paper's description and takes its parameters by the names of the
public data set. Where a description is ambiguous, the rule's docstring says how it is read here.

Languages are detected offline: by script if it is unique here, otherwise by frequent words and
distinctive letters. A few sentences are enough, a name or a formula is not.
"""

import inspect
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_ENOUGH = 0.6
"""Least fraction of letters in the language's script."""
_LOOKED_AT = 20_000
"""Leading characters in which words are counted."""


class Language(NamedTuple):
    scripts: tuple[str, ...]
    """First words of the Unicode names of letters."""
    words: frozenset[str] = frozenset()
    """Frequent words; empty if the script is enough."""
    letters: str = ""
    """Letters that other languages of the same script lack."""


def _of(script: str, words: str, letters: str = "") -> Language:
    return Language((script,), frozenset(words.split()), letters)


LANGUAGES: dict[str, Language] = {
    "en": _of("LATIN", "the of and to in is that it for was on are with as be this have from at "
              "by not or you which an were they but he she we can will has i my your our their a"),
    "es": _of("LATIN", "el la de que y en los las un una por con para es del se no al lo como más "
              "su pero sus ha este esta son muy también cuando hay está mi a", "ñ¿¡"),
    "pt": _of("LATIN", "o a de que e em os as um uma por com para é do da não no na se mais dos "
              "das ao como mas foi são seu sua ou pelo pela também muito você", "ãõ"),
    "fr": _of("LATIN", "le la les de des du et un une est en que qui dans pour pas sur au aux ce "
              "cette il elle nous vous je ne plus par avec sont mais ou a", "œùèêë"),
    "de": _of("LATIN", "der die das und ist nicht ein eine zu den dem mit von auf für sich es im "
              "auch als wie ich sie er wir oder aber werden sind des wird kann", "ß"),
    "it": _of("LATIN", "il lo la i gli le di che e un una è in per non con del della dei sono si "
              "come più ma anche questo questa nel nella al alla ha mi ci "
              "sul sulla dal dalla", "ìò"),
    "pl": _of("LATIN", "i w na z do się nie jest to że o a jak po ale za od co są dla przez tak "
              "czy lub oraz być tym który która może już bardzo ze", "ąęłśźżń"),
    "vi": _of("LATIN", "và là của có không một các những được cho trong với này đã tôi bạn người "
              "để khi như từ đến cũng thì ở rất sẽ", "đơưạảấầẩậắằặẹẻếềểệỉịọỏốồổộớờởợụủứừửựỳỹ"),
    "sw": _of("LATIN", "na ya wa kwa ni katika la za kuwa hii huu hiyo au yake kama lakini pia "
              "sana watu mtu yangu yako moja sisi wewe mimi cha vya hivyo ili kila zaidi"),
    "fi": _of("LATIN", "ja on ei se että oli hän ovat mutta kun tai joka myös niin kuin sen mitä "
              "tämä minä olen voi hyvin ole siitä jos vain sekä"),
    "ru": _of("CYRILLIC", "и в не на я что он с как это по но они к у из за мы так от же вы для "
              "был была были есть или очень быть его", "ыэё"),
    "uk": _of("CYRILLIC", "і в не на що він з як це та до у із за ми так від для був була є або "
              "дуже бути його але також який", "іїєґ"),
    "bg": _of("CYRILLIC", "и в не на да се е от за че той с по но са като това ще съм сме му или "
              "към беше най който много те има което"),
    "ar": _of("ARABIC", "في من على إلى أن هذا هذه التي الذي كان لا ما عن مع هو هي ثم أو كل بعد قد "
              "لم كما بين و", "ةىإأؤئ"),
    "fa": _of("ARABIC", "و در به از که این است را با برای آن یک خود تا کرد بر هم نیز شده می های ما "
              "من او هر باید اما ها"),
    "ur": _of("ARABIC", "کے میں کی ہے اور سے کا کو نے ہیں پر یہ کہ ایک اس بھی تھا لیے ہو وہ تو "
              "نہیں کر جو", "ٹڈڑےںھہ"),
    "hi": _of("DEVANAGARI", "के में की है और से का को ने हैं पर यह कि एक इस भी था लिए हो वह तो नहीं "
              "कर जो मैं आप हम ही तक अपने गया"),
    "mr": _of("DEVANAGARI", "आणि आहे च्या मध्ये हे या ते नाही होते एक आहेत मी तो ती करून तर पण किंवा "
              "साठी आपण असे होता केले खूप झाला झाली झाले", "ळ"),
    "ne": _of("DEVANAGARI", "र छ को मा लाई हो छन् यो भने एक पनि गर्न गर्ने थियो बाट हुन्छ तर म हामी "
              "तपाईं धेरै गरेको भएको हुन् लागि छैन"),
    "he": Language(("HEBREW",)),
    "bn": Language(("BENGALI",)),
    "pa": Language(("GURMUKHI",)),
    "gu": Language(("GUJARATI",)),
    "ta": Language(("TAMIL",)),
    "te": Language(("TELUGU",)),
    "kn": Language(("KANNADA",)),
    "ml": Language(("MALAYALAM",)),
    "th": Language(("THAI",)),
    "ko": Language(("HANGUL",)),
    "ja": Language(("HIRAGANA", "KATAKANA", "CJK")),
    "zh": Language(("CJK",)),
}  # fmt: skip


def is_in(text: str, language: str) -> bool:
    """Whether a text is in a language.

    Args:
        text: with some words in it.
        language: code, as in `LANGUAGES`.

    Raises:
        ValueError: the language cannot be detected.
    """
    if language not in LANGUAGES:
        raise ValueError(f"language {language!r} cannot be told; there are {', '.join(LANGUAGES)}")
    wanted, scripts = LANGUAGES[language], _scripts(text)
    if sum(scripts[each] for each in wanted.scripts) < max(1, _ENOUGH * scripts.total()):
        return False
    if language in ("ja", "zh"):
        return bool(scripts["HIRAGANA"] + scripts["KATAKANA"]) is (language == "ja")
    marks = _marks(text, wanted.scripts)
    return not wanted.words or 0 < marks[language] == max(marks.values())


def reads_as_english(text: str) -> bool:
    """Whether a text has Latin letters, and no other language is more likely than English."""
    scripts = _scripts(text)
    if scripts["LATIN"] < max(1, _ENOUGH * scripts.total()):
        return False
    marks = _marks(text, ("LATIN",))
    return marks["en"] == max(marks.values())


def _scripts(text: str) -> Counter[str]:
    known = {script for each in LANGUAGES.values() for script in each.scripts}
    found = Counter[str]()
    for letter, count in Counter(text).items():
        script = unicodedata.name(letter, "?").split()[0]
        if letter.isalpha() or (script in known and unicodedata.category(letter) in ("Mc", "Mn")):
            found[script] += count
    return found


def _marks(text: str, scripts: tuple[str, ...]) -> dict[str, int]:
    """Counts frequent words, and words with distinctive letters, for each language of a script."""
    text = unicodedata.normalize("NFC", text[:_LOOKED_AT]).lower()
    words = Counter(re.findall(r"[^\W\d_](?:[^\W\d_]|[\u0900-\u0963])*|[¿¡]", text))
    letters = {name: set(each.letters) for name, each in LANGUAGES.items()}
    return {
        name: sum(
            count * ((word in each.words) + bool(letters[name] & set(word)))
            for word, count in words.items()
        )
        for name, each in LANGUAGES.items()
        if each.scripts == scripts
    }


Rule = Callable[..., bool]

_RELATIONS = ("at least", "less than")
_WORD = re.compile(r"\w+")
_WHOLE_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_ABBREVIATION = re.compile(
    r"\b(?:mr|mrs|ms|dr|prof|st|jr|sr|vs|etc|e\.g|i\.e|inc|ltd|co|no|fig|al|approx|[A-Z])\.$",
    re.IGNORECASE,
)
_LONGEST_ABBREVIATION = 10
_ON_THE_LINE = re.compile(r"[ \t]*+\S")
_STOP = re.compile(
    r"(?<![.!?\u2026])[.!?\u2026]++[\"'\u201d\u2019)\]*_]*+(?=\s|$)|[\u3002\uff01\uff1f]+"
)
_NUMBER = re.compile(r"[\s>#*_\"\u201c(-]*(?:\d{1,3}(?:\.\d{1,3})*|[ivx]{1,4})[.)*_]*", re.I)
"""The number of a list item, with its marks: the item's sentence begins after it."""
_BULLET = re.compile(r"^[ \t\"\u201c]*[*-][ \t]+(?=[^\n]*[^\s*-])", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*(?=[^\s*])[^\n*]*(?<=\S)\*\*|\*(?=[^\s*])[^\n*]*(?<=\S)\*")
_FENCE = re.compile(r"```(?:json)?", re.IGNORECASE)
_DECORATION = r"[ \t>#*_\\\"\u201c-]*"
"""Marks before the first word of a line, including an opening quotation mark."""
_BEHIND_A_SENTENCE = r"[.!?\u2026][\"'\u201d\u2019)\]*_]*+[ \t]++"
_MARKS = "\"'\u201c\u201d\u2018\u2019*_.,;:!?()[]#"
_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def instructions_of(metadata: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the instructions of a prompt, and their arguments.

    Raises:
        ValueError: it has none, or the two lists differ in length.
    """
    kinds, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(kinds, list) or not kinds or not isinstance(arguments, list):
        raise ValueError(
            "the line of the data has no lists instruction_id_list and kwargs; it has "
            f"{', '.join(metadata) or 'nothing else'}"
        )
    if len(kinds) != len(arguments):
        raise ValueError(f"instruction_id_list has {len(kinds)} and kwargs {len(arguments)}")
    return [(str(kind), each or {}) for kind, each in zip(kinds, arguments, strict=True)]


def follows(text: str, kind: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a response follows one instruction; an empty one follows none.

    Args:
        kind: of the instruction, as in `RULES`.
        arguments: of the instruction; None counts as absent.

    Raises:
        ValueError: unknown kind, or wrong arguments.
    """
    if kind not in RULES:
        raise ValueError(f"instruction {kind!r} is not known; there are {', '.join(RULES)}")
    given = {name: value for name, value in arguments.items() if value is not None}
    takes = list(inspect.signature(RULES[kind]).parameters)[1:]
    if sorted(given) != sorted(takes):
        raise ValueError(
            f"instruction {kind!r} has kwargs ({', '.join(given)}); it takes ({', '.join(takes)})"
        )
    return bool(text.strip()) and RULES[kind](text, **given)


def has_keywords(text: str, keywords: list[str]) -> bool:
    """Each keyword occurs, be it within a longer word; case does not count."""
    return all(_occurrences(text, each) for each in keywords)


def has_keyword_often(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """Counts as `has_keywords` does."""
    return _compares(_occurrences(text, keyword), relation, frequency)


def lacks_words(text: str, forbidden_words: list[str]) -> bool:
    """None occurs as a whole word; case does not count."""
    return not any(
        re.search(rf"(?<!\w){re.escape(each)}(?!\w)", text, re.IGNORECASE)
        for each in forbidden_words
    )


def has_letter_often(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """A letter in either case."""
    return _compares(_occurrences(text, letter), let_relation, let_frequency)


def is_in_language(text: str, language: str) -> bool:
    """Detected by script and frequent words, see `is_in`."""
    return is_in(text, language)


def has_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Exactly that many paragraphs, none empty, divided by `***`, which may also open or close."""
    parts = [each.strip() for each in re.split(r"(?<!\*)\*{3}(?!\*)", text)]
    parts = parts[not parts[0] : len(parts) - (len(parts) > 1 and not parts[-1])]
    return all(parts) and len(parts) == int(num_paragraphs)


def has_words(text: str, num_words: int, relation: str) -> bool:
    """Runs of letters, digits and underscores: "don't" is two."""
    return _compares(len(_WORD.findall(text)), relation, num_words)


def has_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """A sentence ends with a mark before a space, and has a word in it.

    Abbreviations and initials within a line and item numbers do not end one. Text without an end
    mark (a title, an address) belongs to the next sentence; at the end it is one.
    """
    return _compares(_sentences(text), relation, num_sentences)


def begins_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Exactly that many paragraphs, divided by blank lines, and one's first word is as given.

    Case and marks around the word do not count.
    """
    parts = [each.strip() for each in re.split(r"\n[ \t]*\n", text) if each.strip()]
    number = int(nth_paragraph)
    if len(parts) != int(num_paragraphs) or not 1 <= number <= len(parts):
        return False
    first = parts[number - 1].split()[0].strip(_MARKS)
    return first.lower() == first_word.strip().lower()


def has_postscript(text: str, postscript_marker: str) -> bool:
    """A line or a sentence begins with the marker, and says something.

    Case and the spaces in the marker do not count.
    """
    letters = [re.escape(each) for each in postscript_marker if not each.isspace()]
    marker = r"[ \t]*".join(letters)
    begins = rf"(?:^|{_BEHIND_A_SENTENCE}){_DECORATION}"
    found = re.search(rf"{begins}{marker}(.*)", text, re.I | re.M | re.S)
    return found is not None and _WORD.search(found[1]) is not None


def has_placeholders(text: str, num_placeholders: int) -> bool:
    """At least that many [placeholders] in square brackets."""
    return len(re.findall(r"\[[^\[\]\n]+\]", text)) >= int(num_placeholders)


def has_bullets(text: str, num_bullets: int) -> bool:
    """Exactly that many lines that begin with `* ` or `- `; a rule, as `* * *`, is none."""
    return len(_BULLET.findall(text)) == int(num_bullets)


def has_title(text: str) -> bool:
    """<<A title>> in double angular brackets, on one line."""
    behind = [line.partition("<<")[2].rpartition(">>")[0] for line in text.split("\n")]
    return any(title.strip("<> \t\r") for title in behind)


def is_a_choice(text: str) -> bool:
    """One of the three answers that the instruction offers is given, and no other of them."""
    return sum(each in text for each in _CHOICES) == 1


def has_highlights(text: str, num_highlights: int) -> bool:
    """At least that many *highlights*, on one line each; **bold** is one."""
    return len(_HIGHLIGHT.findall(text)) >= int(num_highlights)


def has_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """At least that many lines that begin with the word and a number."""
    word = re.escape(section_spliter.strip())
    heads = re.findall(rf"^{_DECORATION}{word}[ \t]*(\d+)", text, re.MULTILINE)
    return len(set(heads)) >= int(num_sections)


def is_json(text: str) -> bool:
    """A JSON object or array, and nothing else but a fence around it."""
    text = text.strip()
    if (opened := _FENCE.match(text)) and text.endswith("```"):
        text = text[opened.end() : -3]
    try:
        found = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict | list)


def repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    """Begins with the prompt, word for word; case does not count."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def is_two_responses(text: str) -> bool:
    """Two that differ, divided by six asterisks, which may also open or close."""
    parts = [each.strip() for each in re.split(r"(?<!\*)\*{6}(?!\*)", text)]
    parts = parts[not parts[0] : len(parts) - (len(parts) > 1 and not parts[-1])]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def is_upper_english(text: str) -> bool:
    """English, without a lower-case letter."""
    return text.isupper() and reads_as_english(text)


def is_lower_english(text: str) -> bool:
    """English, without a capital letter."""
    return text.islower() and reads_as_english(text)


def has_capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """Words without a lower-case letter; I and A are two of them."""
    capital = sum(each.isupper() for each in _WHOLE_WORD.findall(text))
    return _compares(capital, capital_relation, capital_frequency)


def ends_with(text: str, end_phrase: str) -> bool:
    """The last words are the phrase; case and quotation marks around it all do not count."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().strip('"').lower())


def is_quoted(text: str) -> bool:
    """Double quotation marks around all of it."""
    text = text.strip()
    return len(text) > 2 and text[0] == text[-1] == '"'


def lacks_commas(text: str) -> bool:
    """No comma anywhere."""
    return "," not in text


RULES: dict[str, Rule] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": has_keyword_often,
    "keywords:forbidden_words": lacks_words,
    "keywords:letter_frequency": has_letter_often,
    "language:response_language": is_in_language,
    "length_constraints:number_paragraphs": has_paragraphs,
    "length_constraints:number_words": has_words,
    "length_constraints:number_sentences": has_sentences,
    "length_constraints:nth_paragraph_first_word": begins_paragraph,
    "detectable_content:postscript": has_postscript,
    "detectable_content:number_placeholders": has_placeholders,
    "detectable_format:number_bullet_lists": has_bullets,
    "detectable_format:title": has_title,
    "detectable_format:constrained_response": is_a_choice,
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:multiple_sections": has_sections,
    "detectable_format:json_format": is_json,
    "combination:repeat_prompt": repeats_prompt,
    "combination:two_responses": is_two_responses,
    "change_case:english_capital": is_upper_english,
    "change_case:english_lowercase": is_lower_english,
    "change_case:capital_word_frequency": has_capital_words,
    "startend:end_checker": ends_with,
    "startend:quotation": is_quoted,
    "punctuation:no_comma": lacks_commas,
}
"""Kind of instruction, by the name of the public data set -> rule."""


def _occurrences(text: str, words: str) -> int:
    return text.lower().count(words.strip().lower())


def _compares(count: int, relation: str, bound: float) -> bool:
    if relation not in _RELATIONS:
        raise ValueError(f"relation {relation!r} is not known; it is {' or '.join(_RELATIONS)}")
    return count >= bound if relation == "at least" else count < bound


def _sentences(text: str) -> int:
    count = begun = 0
    text = text.rstrip()
    for stop in _STOP.finditer(text):
        before = text[max(begun, stop.end() - _LONGEST_ABBREVIATION) : stop.end()]
        if _ABBREVIATION.search(before) and _ON_THE_LINE.match(text, stop.end()):
            continue
        line = text.rfind("\n", 0, stop.start()) + 1
        if _NUMBER.fullmatch(text, max(begun, line), stop.end()):
            continue
        count += _WORD.search(text, begun, stop.end()) is not None
        begun = stop.end()
    return count + (_WORD.search(text, begun) is not None)


def _no_json(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
