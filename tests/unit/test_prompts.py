"""What a row of data becomes, in which order, and which prompts are there twice."""

import asyncio
import json
from decimal import Decimal
from pathlib import Path

import pytest
from episode_fakes import answer
from typer.testing import CliRunner

from relax_hpc.cli.demo import models, tasks
from relax_hpc.cli.main import app
from relax_hpc.config.job_file import load
from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.data import overlap
from relax_hpc.data.media.source import MediaSource
from relax_hpc.data.records import PromptRecord, Records, read_record
from relax_hpc.data.rows import DataRow
from relax_hpc.data.source import PromptSource
from relax_hpc.environments.record import EpisodeRecord
from relax_hpc.environments.session import Session
from relax_hpc.errors import ConfigError
from relax_hpc.inference.generation import Sampling


@pytest.fixture(scope="module")
def tokens():
    return models.tokenizer()


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def source(path, tokens, shuffle_seed=0, **changes):
    settings = PromptsConfig(train=path, **changes)
    records = Records(settings.mixture, settings)
    records.read()
    return PromptSource(records, tokens, shuffle_seed=shuffle_seed, settings=settings)


RENDERED = "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def seven(tmp_path):
    records = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(7)]
    return lines(tmp_path / "p.jsonl", *records)


def test_an_epoch_asks_every_prompt_once_and_the_next_in_another_order(seven, tokens):
    prompts = source(seven, tokens)
    first, second = ([prompts[e * 7 + k].index for k in range(7)] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second and first != list(range(7))
    after = source(seven, tokens)  # a restart
    far_first = [after[k] for k in reversed(range(50))][::-1]
    assert [prompts[k] for k in range(50)] == far_first


def test_text_is_a_user_turn_under_the_chat_template_and_bare_without(tmp_path, tokens):
    text = lines(tmp_path / "text", {"prompt": "1+2=", "answer": "3", "level": 4})
    chat = lines(tmp_path / "chat", ROW | {"prompt": [{"role": "user", "content": "1+2="}]})
    assert tokens.decode(source(text, tokens)[0].token_ids) == RENDERED
    of_chat, of_text = source(chat, tokens)[0], source(text, tokens)[0]
    assert of_chat.token_ids == of_text.token_ids
    assert of_chat.messages == of_text.messages == [{"role": "user", "content": "1+2="}]
    assert tokens.decode(source(text, tokens, chat_template=False)[0].token_ids) == "1+2="
    with pytest.raises(ConfigError, match="chat_template = true"):
        source(chat, tokens, chat_template=False)[0]


def test_a_tokenizer_adds_its_special_tokens_to_plain_text_and_not_to_a_rendered_prompt(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokens = models.tokenizer()
    mark = tokens.eos_token
    tokens.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{mark} $A", special_tokens=[(mark, tokens.eos_token_id)]
    )
    path = lines(tmp_path / "p", ROW)
    assert tokens.decode(source(path, tokens)[0].token_ids) == RENDERED
    assert tokens.decode(source(path, tokens, chat_template=False)[0].token_ids) == mark + "1+2="


def test_a_prompt_too_long_is_named_with_its_remedy(tmp_path, tokens):
    path = lines(tmp_path / "p", {"prompt": "12", "answer": "3"}, {"prompt": "1234", "answer": "3"})
    prompts = source(path, tokens, chat_template=False, max_prompt_tokens=3)
    assert len(prompts.prompt(0).token_ids) == 2
    exactly = source(path, tokens, chat_template=False, max_prompt_tokens=4)
    assert len(exactly.prompt(1).token_ids) == 4
    with pytest.raises(ConfigError, match=r"line 2: the prompt has 4 tokens, .*_tokens = 3; raise"):
        prompts.examine(range(2))


def test_sums_are_right_distinct_and_nothing_held_out_is_trained_on(tmp_path):
    tasks.write_additions(tmp_path, digits=2, num_train=8000, num_heldout=100, seed=0)
    parts = []
    for name in ("train.jsonl", "heldout.jsonl"):
        records = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        pairs = [r["prompt"][0]["content"].removesuffix("=").split("+") for r in records]
        assert [str(int(a) + int(b)) for a, b in pairs] == [r["answer"] for r in records]
        parts.append({(int(a), int(b)) for a, b in pairs})
    train, heldout = parts
    # 8100 sums in all: every pair of two-digit numbers is there, once.
    assert (len(train), len(heldout)) == (8000, 100)
    assert train | heldout == {(a, b) for a in range(10, 100) for b in range(10, 100)}


THINKING = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}"
    "{%- endif %}{%- endif %}"
)
ROW = {"prompt": "1+2=", "answer": "3"}
SUM = {"question": "1+2=", "info": {"solution": "3", "level": 4}, "source": "book", "set": "sums"}
COLUMNS = {"prompt": "question", "answer": "info.solution", "source": "set"}


@pytest.fixture(scope="module")
def thinker():
    made = models.tokenizer()
    made.chat_template = THINKING
    return made


def read(fields, **settings):
    return read_record(DataRow("f, line 1", fields), PromptsConfig(train="f", **settings))


def asked(path, tokens, *rows, **settings):
    """A source of these rows, in their order."""
    return source(lines(path, *rows), tokens, shuffle_seed=None, **settings)


def test_columns_have_the_names_that_the_data_gives_them_and_the_others_are_metadata():
    record = read(SUM, columns=COLUMNS)
    assert (record.prompt, record.answer, record.source) == ("1+2=", "3", "sums")
    assert record.metadata == {"info": SUM["info"], "source": "book"}
    literal = read({"prompt": "x", "a.b": "1", "a": {"b": "2"}}, columns={"answer": "a.b"})
    assert read(SUM, columns=COLUMNS | {"answer": "info.level"}).answer == "4", "an integer is text"
    assert (literal.answer, literal.metadata) == ("1", {"a": {"b": "2"}})
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert read(SUM | {"can": tools}, columns=COLUMNS | {"tools": "can"}).tools == tools


@pytest.mark.parametrize(
    ("answer", "text"),
    [(-0.5, "-0.5"), (1e22, "1" + "0" * 22), (Decimal("2.50"), "2.50"), ([27.0], "27")],
)
def test_an_answer_may_be_a_float_or_a_list_of_one_as_in_public_sets(answer, text):
    """R12: AMC23, SVAMP, OlympiadBench."""
    assert read(SUM | {"answer": answer}, columns=COLUMNS | {"answer": "answer"}).answer == text


@pytest.mark.parametrize("answer", [["1", "2"], [], [True], float("inf"), None])
def test_an_answer_that_has_several_texts_or_none_is_refused(answer):
    """R12."""
    with pytest.raises(ConfigError, match="must be text, a number or a list of one"):
        read(SUM | {"answer": answer}, columns=COLUMNS | {"answer": "answer"})


@pytest.mark.parametrize(("columns", "said"), [
    ({}, "f, line 1: has no prompt; it has question, info.solution, info.level, source, set; "),
    ({"answer": "info.answer"}, "f, line 1: has no info.answer; it has question, info.sol"),
    ({"answer": "info"}, "info = {'level': 4, 'solution': '3'}: must be text"),
])  # fmt: skip
def test_a_missing_or_wrong_column_is_named_with_those_there_are(columns, said):
    full = ({"prompt": "question"} | COLUMNS | columns) if columns else columns
    with pytest.raises(ConfigError) as error:
        read(SUM, columns=full)
    assert said in str(error.value)


def test_what_a_row_may_lack_may_be_null():
    null = dict.fromkeys(("tools", "source", "template_args"))
    assert read(ROW | null)._replace(metadata={}) == read(ROW)


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_message_of_tool_calls_alone_has_an_empty_text(content):
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}]
    asked, calling = {"role": "user", "content": "1+2="}, {"role": "assistant", "tool_calls": calls}
    said = {"role": "tool", "content": "3"}
    found = read({"prompt": [asked, calling | content, said], "answer": "3"}).prompt
    assert found == [asked, calling | {"content": ""}, said]
    with pytest.raises(ConfigError, match="must be text, or messages of role and content"):
        read({"prompt": [asked, {"role": "assistant"} | content], "answer": "3"})


def test_a_system_message_is_put_where_a_row_has_none():
    user, own = {"role": "user", "content": "1+2="}, {"role": "system", "content": "Own."}
    added = [own | {"content": "Add."}, user]
    for prompt, found in (("1+2=", added), ([own, user], [own, user]), ([user], added)):
        assert read({"prompt": prompt, "answer": "3"}, system="Add.").prompt == found


def test_the_text_of_the_last_user_message_is_put_into_the_template_of_prompts():
    box = "{prompt} Put it into \\boxed{}: {prompt}"
    boxed = read({"prompt": "{x}", "answer": "3"}, user=box).prompt
    assert boxed == "{x} Put it into \\boxed{}: {x}"
    talk = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user", "tool")]
    asked = read({"prompt": talk, "answer": "3"}, user="<{prompt}>").prompt
    assert [message["content"] for message in asked] == ["u", "a", "<u>", "t"]
    assert [message["content"] for message in talk] == ["u", "a", "u", "t"]  # as it was
    with pytest.raises(ConfigError, match="the prompt is empty"):
        read({"prompt": " ", "answer": "3"}, user=box)


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("prefix", ["", "<think>\n", "Well, 1"])
def test_the_tokens_are_those_of_transformers_for_the_same_arguments(
    tmp_path, thinker, thinking, prefix
):
    args = {} if thinking is None else {"enable_thinking": thinking}
    settings = {"template_args": args, "system": "Add.", "assistant_prefix": prefix}
    prompt = asked(tmp_path / "p", thinker, ROW, **settings)[0]
    given = {"add_generation_prompt": True, **args}
    text = thinker.apply_chat_template(prompt.messages, tokenize=False, **given)
    assert prompt.token_ids == thinker.encode(text + prefix, add_special_tokens=False)
    if prefix and thinking is not False:
        messages = [*prompt.messages, {"role": "assistant", "content": prefix}]
        assert prompt.token_ids == thinker.apply_chat_template(
            messages, continue_final_message=True, return_dict=False, **args
        )


def test_a_rows_template_arguments_go_before_the_jobs(tmp_path, thinker):
    rows = ROW, ROW | {"template_args": {"enable_thinking": False}, "level": 1}
    prompts = asked(tmp_path / "p", thinker, *rows, template_args={"enable_thinking": True})
    ends = [thinker.decode(prompts[n].token_ids).endswith("<think></think>") for n in (0, 1)]
    assert ends == [False, True]
    assert prompts[1].metadata == {"level": 1}


def test_every_turn_of_an_episode_is_asked_with_arguments_and_prefix(tmp_path, thinker):
    row = ROW | {"template_args": {"enable_thinking": False}}
    prompts = asked(tmp_path / "p", thinker, row, assistant_prefix="So ")
    record, replies = EpisodeRecord(), iter(["3<|im_end|>", "4"])

    class Engine:
        async def sample(self, given, draft, how, *, seed, homes):
            ids = thinker.encode(next(replies), add_special_tokens=False)
            return answer(draft, ids, [-1.0] * len(ids), [(0, 0)])

    async def two_turns():
        prompt, how = prompts[0], Sampling(1.0, 50, max_tokens=1000)
        session = Session(
            prompt, record, Engine(), prompts.conversation, how, group=0, episode=0, seed=0
        )
        first = await session.chat()
        await session.chat([*first.messages, {"role": "user", "content": "+1="}])
        return first

    first = asyncio.run(two_turns())
    assert first.text == "3"
    begin = "<|im_start|>assistant\n<think></think>So "
    assert thinker.decode(record.calls[1].token_ids) == (
        f"<|im_start|>user\n1+2=<|im_end|>\n{begin}3<|im_end|>\n"
        f"<|im_start|>user\n+1=<|im_end|>\n{begin}4"
    )


@pytest.mark.parametrize(("setting", "said"), [
    ("prompts.template_args={think=false}", "the chat template in JINJA ignores it; it takes"),
    ("prompts.user='Solve it'", "prompts.user = 'Solve it': leaves the prompt out; write {pr"),
    ("prompts.columns.source='set'", "prompts.columns.source = 'set': none of the 4 rows that"),
])  # fmt: skip
def test_a_setting_that_cannot_work_is_refused_before_anything_is_queued(refused, setting, said):
    where = str(Path("model/chat_template.jinja").absolute())
    found = refused("submit", "job.toml", "--local", "--set", setting)
    assert said.replace("JINJA", where) in found


def test_a_system_message_that_the_template_leaves_out_is_refused(refused):
    template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    Path("model/chat_template.jinja").write_text(template, encoding="utf-8")
    said = refused("submit", "job.toml", "--local", "--set", "prompts.system='Add.'")
    assert said.startswith("prompts.system: the chat template leaves system messages out")
    load(Path("job.toml"), ["prompts.system='Add.'"])


class Prompts(list):
    def __init__(self, name, *prompts):
        super().__init__(PromptRecord(prompt, "1") for prompt in prompts)
        self.name = name

    def where(self, index):
        return f"{self.name}:{index}"


def words(first, count):
    return " ".join(chr(97 + n % 26) * 2 + str(n) for n in range(first, first + count))


def find(train, *heldout, most=None):
    train, heldout = Prompts("train", *train), Prompts("heldout", *heldout)
    return overlap.find(train, {"heldout": (heldout, len(heldout))}, most)


def test_a_prompt_that_was_there_before_is_counted_and_shown_with_the_first_of_its_kind():
    found = find(["a", "b", "a", "c", " a\n", "b", "A"])
    assert found.repeated.num_prompts == 3
    assert list(found.repeated.examples) == [
        ("train:2", "train:0"), ("train:4", "train:0"), ("train:5", "train:1")
    ]  # fmt: skip


def test_texts_and_messages_are_compared_by_what_is_asked():
    system = {"role": "system", "content": "Add."}
    user = {"role": "user", "content": "1+2="}
    found = find(["1+3=", [user]], [system, user], "1+2=", "1-2=")
    assert found.sets["heldout"].same.num_prompts == 2  # signs tell them apart, systems do not
    assert found.sets["heldout"].same.examples[0] == ("heldout:0", "train:1")


def test_thirteen_words_in_a_row_are_an_overlap_and_twelve_are_none():
    train = ["x", f"{words(0, 13)}!"]
    [thirteen, twelve] = (
        find(train, f"Now: {words(0, n).upper()} then").sets["heldout"] for n in (13, 12)
    )
    assert (thirteen.same.num_prompts, thirteen.alike) == (0, (1, [("heldout:0", "train:1")]))
    assert twelve.alike.num_prompts == 0
    other_order = " ".join(reversed(words(0, 13).split()))
    assert find(train, other_order).sets["heldout"].alike.num_prompts == 0
    across = find([words(0, 7), words(7, 7)], words(0, 14)).sets["heldout"]
    assert across.alike.num_prompts == 0, "words do not run from one prompt into the next"
    found = find([words(0, 20)], words(0, 20), words(1, 20)).sets["heldout"]
    assert found.same.num_prompts == 1, "which is not counted again as alike"
    assert found.alike == (1, [("heldout:1", "train:0")])


def test_a_preamble_that_many_prompts_of_a_set_have_tells_nothing():
    preamble = words(0, 15)
    heldout = [f"{preamble} {words(100 * n, 14)}" for n in range(1, 31)]
    alone, whole = f"{preamble} {words(9000, 20)}", f"{preamble} {words(300, 14)}"
    assert find([alone], *heldout).sets["heldout"].alike.num_prompts == 0
    found = find([alone, whole], *heldout).sets["heldout"]
    assert (found.same.num_prompts, found.alike.num_prompts) == (1, 0)
    part = find([alone, words(300, 13)], *heldout).sets["heldout"]
    assert part.alike == (1, [("heldout:2", "train:1")])
    wish = words(0, 11)
    heldout = [f"{words(100 * n, 14)} {wish}" for n in range(1, 31)]
    begins_otherwise = f"{words(9000, 20)} {words(512, 2)} {wish}"
    assert find([begins_otherwise], *heldout).sets["heldout"].alike.num_prompts == 0


def command(*arguments):
    answer = CliRunner().invoke(app, ["data", "job.toml", *arguments])
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_the_command_compares_all_prompts_of_a_job_and_counts_what_cannot_be_used(job, monkeypatch):
    def write(name, *rows):
        Path(name).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")

    monkeypatch.setattr(overlap, "_CHUNK", 3)
    lines = [json.dumps({"prompt": f"{n % 5}+1=", "answer": "1"}) for n in range(7)]
    write("train.jsonl", *lines)
    write("heldout.jsonl", lines[3], "no row")
    skip = "--set=prompts.bad_rows=skip"
    assert command(skip).splitlines()[1:] == [
        "prompts.train: 7 prompts",
        "prompts.train: 2 of 7 prompts are there before, e.g. train.jsonl, line 6 as train.jsonl, "
        "line 1; train.jsonl, line 7 as train.jsonl, line 2",
        "eval.heldout: 1 of 2 prompts are trained on, e.g. heldout.jsonl, line 1 as train.jsonl, "
        "line 4",
    ]
    found = json.loads(command(skip, "--json"))
    assert found["sets"]["heldout"]["left_out"]["num_rows"] == 1
    write("train.jsonl", lines[0], "x", lines[0], "y", "z")
    said = command(skip).splitlines()[1]
    first = "5 prompts, 3 of which cannot be used; the first: train.jsonl, line 2: "
    assert said.startswith(f"prompts.train: {first}")


def test_one_question_about_two_images_is_two_prompts(tmp_path):
    data = MediaSource("x: image 1", "image", data=b"one")
    whole = MediaSource("x: image 1", "image", path=tmp_path / "a.png")
    train, heldout = Prompts("train"), Prompts("heldout")
    media = [(whole,), (whole._replace(offset=8, size=4),), (data,), (whole, data)]
    train += [PromptRecord("colour?", "1", media=each) for each in media]
    media = [(whole._replace(place="y: image 1"),), (data, whole), (data._replace(data=b"two"),)]
    heldout += [PromptRecord("colour?", "1", media=each) for each in media]
    found = overlap.find(train, {"heldout": (heldout, len(heldout))})
    assert found.repeated.num_prompts == 0
    assert found.sets["heldout"].same == (1, [("heldout:0", "train:0")])
