"""What a row of data becomes: columns, system message, template arguments, the answer's prefix."""

import asyncio
import json
from pathlib import Path

import pytest
from episode_fakes import answer

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.demo import checkpoint
from relax_hpc.environments.record import Record
from relax_hpc.environments.session import Session
from relax_hpc.errors import ConfigError
from relax_hpc.job_file import load
from relax_hpc.prompts.record import read_record
from relax_hpc.prompts.records import Records
from relax_hpc.prompts.rows import Row
from relax_hpc.prompts.source import PromptSource
from relax_hpc.prompts.template import Template
from relax_hpc.sampling.how import How

THINKING = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}"
    "{%- endif %}{%- endif %}"
)
SUM = {"question": "1+2=", "info": {"solution": "3", "level": 4}, "source": "book", "set": "sums"}
COLUMNS = {"prompt": "question", "answer": "info.solution", "source": "set"}


@pytest.fixture(scope="module")
def tokens():
    made = checkpoint.tokenizer()
    made.chat_template = THINKING
    return made


def read(fields, **settings):
    return read_record(Row("f, line 1", fields), PromptsConfig(train="f", **settings))


def source(path, tokens, *rows, **settings):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = PromptsConfig(train=path, **settings)
    records = Records(settings.mixture, settings)
    records.read()
    return PromptSource(records, tokens, shuffle_seed=None, settings=settings)


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
    ("columns", "said"),
    [
        ({}, "f, line 1: has no prompt; it has question, info.solution, info.level, source, set; "
             "set prompts.columns.prompt to the field that is the prompt"),
        ({"answer": "info.answer"}, "f, line 1: has no info.answer; it has question, info.sol"),
        ({"answer": "set.solution"}, "has no set.solution; it has"),
        ({"answer": "info"}, "info = {'level': 4, 'solution': '3'}: must be text"),
        ({"tools": "set"}, "set = 'sums': must be a list of objects"),
        ({"source": "info"}, "info = {'level': 4, 'solution': '3'}: must be text"),
    ],
)  # fmt: skip
def test_a_missing_or_wrong_column_is_named_with_those_there_are(columns, said):
    full = ({"prompt": "question"} | COLUMNS | columns) if columns else columns
    with pytest.raises(ConfigError) as error:
        read(SUM, columns=full)
    assert said in str(error.value)


def test_what_a_row_may_lack_may_be_null():
    lacking = {"prompt": "1+2=", "answer": "3"}
    null = dict.fromkeys(("tools", "source", "template_args"))
    assert read(lacking | null)._replace(metadata={}) == read(lacking)


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
    text = read({"prompt": "1+2=", "answer": "3"}, system="Add.")
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
    tmp_path, tokens, thinking, prefix
):
    args = {} if thinking is None else {"enable_thinking": thinking}
    settings = {"template_args": args, "system": "Add.", "assistant_prefix": prefix}
    prompts = source(tmp_path / "p", tokens, {"prompt": "1+2=", "answer": "3"}, **settings)
    messages = prompts[0].messages
    text = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **args)
    ids = tokens.encode(text + prefix, add_special_tokens=False)
    assert prompts[0].token_ids == ids
    if prefix and thinking is not False:
        answer = {"role": "assistant", "content": prefix}
        continued = tokens.apply_chat_template(
            [*messages, answer], continue_final_message=True, return_dict=False, **args
        )
        assert ids == continued
    if not prefix:
        whole = tokens.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **args
        )
        assert ids == whole


def test_without_a_chat_template_a_prefix_follows_the_text(tmp_path, tokens):
    settings = {"chat_template": False, "user": "Q: {prompt}\n", "assistant_prefix": "A:"}
    prompts = source(tmp_path / "p", tokens, {"prompt": "1+2=", "answer": "3"}, **settings)
    assert tokens.decode(prompts[0].token_ids) == "Q: 1+2=\nA:"


def test_a_rows_template_arguments_go_before_the_jobs(tmp_path, tokens):
    rows = [{"prompt": "1+2=", "answer": "3"}]
    rows.append(rows[0] | {"template_args": {"enable_thinking": False}, "level": 1})
    prompts = source(tmp_path / "p", tokens, *rows, template_args={"enable_thinking": True})
    ends = [tokens.decode(prompts[n].token_ids).endswith("<think></think>") for n in (0, 1)]
    assert ends == [False, True]
    assert prompts[1].metadata == {"level": 1}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"template_args": "x"}, "template_args = 'x': must be an object"),
        ({"template_args": {"tokenize": True}}, "template_args.tokenize: is said by the run its"),
        ({"template_args": {"think": True}}, "template_args.think: the chat template in "),
    ],
)
def test_a_rows_template_arguments_that_cannot_be_are_named_with_its_line(
    tmp_path, tokens, row, said
):
    good = {"prompt": "1+2=", "answer": "3"}
    with pytest.raises(ConfigError) as error:
        source(tmp_path / "p", tokens, good, good | row)[1]
    assert str(error.value).startswith(f"{tmp_path / 'p'}, line 2: ") and said in str(error.value)


def test_every_turn_of_an_episode_is_asked_with_arguments_and_prefix(tmp_path, tokens):
    rows = {"prompt": "1+2=", "answer": "3", "template_args": {"enable_thinking": False}}
    prompts = source(tmp_path / "p", tokens, rows, assistant_prefix="So ")
    record, replies = Record(), iter(["3<|im_end|>", "4"])

    class Engine:
        async def sample(self, given, draft, how, *, seed, homes):
            ids = tokens.encode(next(replies), add_special_tokens=False)
            return answer(draft, ids, [-1.0] * len(ids), [(0, 0)])

    async def two_turns():
        prompt, how = prompts[0], How(1.0, 50, 1000)
        session = Session(
            prompt, record, Engine(), prompts.conversation, how, group=0, episode=0, seed=0
        )
        first = await session.chat()
        await session.chat([*first.messages, {"role": "user", "content": "+1="}])
        return first

    first = asyncio.run(two_turns())
    assert first.text == "3"
    begin = "<|im_start|>assistant\n<think></think>So "
    assert tokens.decode(record.calls[1].token_ids) == (
        f"<|im_start|>user\n1+2=<|im_end|>\n{begin}3<|im_end|>\n"
        f"<|im_start|>user\n+1=<|im_end|>\n{begin}4"
    )


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("prompts.template_args={think=false}",
         "prompts.template_args.think: the chat template in JINJA ignores it; it takes none; remo"),
        ("prompts.template_args={tools=1}", "template_args = {'tools': 1}: tools is said by"),
        ("prompts.user='Solve it'", "prompts.user = 'Solve it': leaves the prompt out; write {pr"),
        ("prompts={chat_template=false,system='Add.'}", ": system needs chat_template = true; use"),
        ("prompts={chat_template=false,template_args={x=1}}", ": template_args needs chat_templ"),
        ("prompts.columns.answer='solution'", "line 1: has no solution; it has prompt, answer"),
        ("prompts.columns.source='set'", "prompts.columns.source = 'set': none of the 4 rows that"),
        ("prompts.columns.tools='can'", "looked at has it; the first has prompt, answer"),
        ("prompts.columns.promt='x'", "unknown key; did you mean prompts.columns.prompt?"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_work_is_refused_before_anything_is_queued(refused, setting, said):
    where = str(Path("model/chat_template.jinja").absolute())
    found = refused("submit", "job.toml", "--local", "--set", setting)
    assert said.replace("JINJA", where) in found


def test_a_system_message_that_the_template_leaves_out_is_refused(refused):
    template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    Path("model/chat_template.jinja").write_text(template)
    said = refused("submit", "job.toml", "--local", "--set", "prompts.system='Add.'")
    assert said.startswith("prompts.system: the chat template leaves system messages out")
    load(Path("job.toml"), ["prompts.system='Add.'"])


NAMES = {
    "{% for m in messages %}{{ m }}{% endfor %}": {"messages"},
    "{%- set thinks = enable_thinking if enable_thinking is defined else true %}{{ thinks }}": {
        "enable_thinking"
    },
    "{# enable_thinking #}{{ 'enable_thinking' }}": set(),
    "{% generation %}{{ a }}{%- endgeneration -%}{% for x in b %}{% break %}{% endfor %}": {
        "a",
        "b",
    },
    "{% set x = 1 %}{{ x }}": set(),
    "{{ namespace(y=z).y | tojson }}": {"namespace", "z"},
}


@pytest.mark.parametrize("text", NAMES)
def test_a_template_says_which_names_it_asks_for(tokens, text):
    template = Template(tokens)
    template.text = text
    assert template.names - {"namespace"} == NAMES[text] - {"namespace"}
