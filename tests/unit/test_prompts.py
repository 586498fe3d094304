"""What a row of data becomes, and in which order: columns, template, prefix, shuffles, refusals."""

import asyncio
import json
from decimal import Decimal
from pathlib import Path

import pytest
from episode_fakes import answer

from relax_hpc.cli.demo import models, tasks
from relax_hpc.config.job_file import load
from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.data.records import Records, read_record
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


@pytest.fixture
def seven(tmp_path):
    records = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(7)]
    return lines(tmp_path / "p.jsonl", *records)


def test_an_epoch_asks_every_prompt_once_and_the_next_in_another_order(seven, tokens):
    prompts = source(seven, tokens)
    first, second = ([prompts[e * 7 + k].index for k in range(7)] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert first != list(range(7))


def test_an_ordinal_names_the_same_prompt_after_a_restart_and_in_any_order_of_asking(seven, tokens):
    before, after = source(seven, tokens), source(seven, tokens)
    far_first = [after[k] for k in reversed(range(50))][::-1]
    assert [before[k] for k in range(50)] == far_first


def test_text_is_a_user_turn_under_the_chat_template_and_bare_without(tmp_path, tokens):
    text = lines(tmp_path / "text", {"prompt": "1+2=", "answer": "3", "level": 4})
    chat = lines(tmp_path / "chat", ROW | {"prompt": [{"role": "user", "content": "1+2="}]})
    rendered = "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    assert tokens.decode(source(text, tokens)[0].token_ids) == rendered
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
    rendered = "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    assert tokens.decode(source(path, tokens)[0].token_ids) == rendered
    assert tokens.decode(source(path, tokens, chat_template=False)[0].token_ids) == mark + "1+2="


def test_a_prompt_too_long_is_named_with_its_remedy(tmp_path, tokens):
    path = lines(tmp_path / "p", {"prompt": "12", "answer": "3"}, {"prompt": "1234", "answer": "3"})
    prompts = source(path, tokens, chat_template=False, max_prompt_tokens=3)
    assert len(prompts.prompt(0).token_ids) == 2
    exactly = source(path, tokens, chat_template=False, max_prompt_tokens=4)
    assert len(exactly.prompt(1).token_ids) == 4
    with pytest.raises(
        ConfigError, match=r"line 2: the prompt has 4 tokens, .*max_prompt_tokens = 3; raise"
    ):
        prompts.examine(range(2))


GOOD = b'{"prompt": "1+1=", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \n", "is empty; it has to hold a row"),
        (b"\x89PNG\xff\x00", "not UTF-8"),
        (GOOD + b"{prompt\n", "line 2: is not JSON"),
        (GOOD + b"\n[1]\n", "line 3: is not an object"),
        (b'{"prompt": 5, "answer": "2"}', "line 1: prompt = 5: must be text"),
        (b'{"prompt": [{"role": "user"}], "answer": "2"}', "line 1: prompt"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_file_and_line(
    tmp_path, tokens, content, message
):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        source(path, tokens)
    assert str(error.value).startswith(str(path)) and message in str(error.value)


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
    [
        (27.0, "27"),
        (-0.5, "-0.5"),
        (1e22, "10000000000000000000000"),
        (1e-7, "1e-07"),
        (Decimal("2.50"), "2.50"),
        (["$x = 5$"], "$x = 5$"),
        ([27.0], "27"),
    ],
)
def test_an_answer_may_be_a_float_or_a_list_of_one_as_in_public_sets(answer, text):
    """R12: AMC23, SVAMP, OlympiadBench."""
    assert read(SUM | {"answer": answer}, columns=COLUMNS | {"answer": "answer"}).answer == text


@pytest.mark.parametrize("answer", [["1", "2"], [], [["1"]], True, [True], float("inf"), None])
def test_an_answer_that_has_several_texts_or_none_is_refused(answer):
    """R12."""
    with pytest.raises(ConfigError, match="must be text, a number or a list of one"):
        read(SUM | {"answer": answer}, columns=COLUMNS | {"answer": "answer"})


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, "f, line 1: has no prompt; it has question, info.solution, info.level, source, set; "
             "set prompts.columns.prompt to the field that is the prompt"),
        ({"answer": "info.answer"}, "f, line 1: has no info.answer; it has question, info.sol"),
        ({"answer": "info"}, "info = {'level': 4, 'solution': '3'}: must be text"),
        ({"tools": "set"}, "set = 'sums': must be a list of objects"),
    ],
)  # fmt: skip
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
    asked = {"role": "user", "content": "1+2="}
    before = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "3"}]
    chat = [asked, before[0] | content, before[1]]
    found = read({"prompt": chat, "answer": "3"}).prompt
    assert found == [asked, before[0] | {"content": ""}, before[1]]
    with pytest.raises(ConfigError, match="must be text, or messages of role and content"):
        read({"prompt": [asked, {"role": "assistant"} | content], "answer": "3"})


def test_a_system_message_is_put_where_a_row_has_none():
    text = read(ROW, system="Add.")
    assert text.prompt == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+2="},
    ]
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "1+2="}]
    assert read({"prompt": own, "answer": "3"}, system="Add.").prompt == own
    assert read({"prompt": own[1:], "answer": "3"}, system="Add.").prompt == text.prompt


def test_the_text_of_the_last_user_message_is_put_into_the_template_of_prompts():
    box = "{prompt} Put it into \\boxed{}: {prompt}"
    assert read({"prompt": "{x}", "answer": "3"}, user=box).prompt == (
        "{x} Put it into \\boxed{}: {x}"
    )
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


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("prompts.template_args={think=false}",
         "prompts.template_args.think: the chat template in JINJA ignores it; it takes none; remo"),
        ("prompts.user='Solve it'", "prompts.user = 'Solve it': leaves the prompt out; write {pr"),
        ("prompts={chat_template=false,system='Add.'}", ": system needs chat_template = true; use"),
        ("prompts.columns.source='set'", "prompts.columns.source = 'set': none of the 4 rows that"),
    ],
)  # fmt: skip
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
