import json

import pytest

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.demo import arithmetic, checkpoint
from relax_hpc.errors import ConfigError
from relax_hpc.prompts import tokenizer
from relax_hpc.prompts.records import Records
from relax_hpc.prompts.source import PromptSource


@pytest.fixture(scope="module")
def tokens():
    return checkpoint.tokenizer()


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def source(path, tokens, shuffle_seed=0, **changes):
    settings = PromptsConfig(train=path, **({"max_prompt_tokens": 64} | changes))
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


def test_another_seed_shuffles_otherwise(seven, tokens):
    a, b = (source(seven, tokens, shuffle_seed=s) for s in (0, 1))
    assert [a[k].index for k in range(7)] != [b[k].index for k in range(7)]


def test_without_a_seed_the_order_is_the_files(seven, tokens):
    prompts = source(seven, tokens, shuffle_seed=None)
    assert [prompts[k].index for k in range(14)] == [*range(7), *range(7)]
    assert prompts[10].answer == "6"


def test_a_negative_ordinal_is_not_the_end_of_the_file(seven, tokens):
    with pytest.raises(IndexError, match="start at 0"):
        source(seven, tokens)[-1]


def test_text_is_a_user_turn_under_the_chat_template_and_bare_without(tmp_path, tokens):
    text = lines(tmp_path / "text", {"prompt": "1+2=", "answer": "3", "level": 4})
    chat = lines(
        tmp_path / "chat", {"prompt": [{"role": "user", "content": "1+2="}], "answer": "3"}
    )
    rendered = "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    assert tokens.decode(source(text, tokens)[0].token_ids) == rendered
    of_chat, of_text = source(chat, tokens)[0], source(text, tokens)[0]
    assert of_chat.token_ids == of_text.token_ids
    assert of_chat.messages == of_text.messages == [{"role": "user", "content": "1+2="}]
    assert tokens.decode(source(text, tokens, chat_template=False)[0].token_ids) == "1+2="
    with pytest.raises(ConfigError, match="chat_template = true"):
        source(chat, tokens, chat_template=False)[0]


def test_what_else_a_line_says_goes_with_the_prompt(tmp_path, tokens):
    asked = {"prompt": "1+2=", "answer": "3"}
    tools = [{"type": "function", "function": {"name": "add"}}]
    path = lines(tmp_path / "p", asked | {"tools": tools, "source": "sums", "level": 4}, asked)
    first, second = (source(path, tokens, shuffle_seed=None)[index] for index in (0, 1))
    assert (first.tools, first.source, first.metadata) == (tools, "sums", {"level": 4})
    assert (second.tools, second.source, second.metadata, second.media) == (None, "", {}, ())
    assert first.where == f"{path}, line 1"
    for wrong in ({"tools": ["add"]}, {"source": 3}):
        with pytest.raises(ConfigError, match=f"line 1: {next(iter(wrong))} = .*must be"):
            source(lines(tmp_path / "q", asked | wrong), tokens)


def test_a_tokenizer_adds_its_special_tokens_to_plain_text_and_not_to_a_rendered_prompt(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokens = checkpoint.tokenizer()
    mark = tokens.eos_token
    tokens.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{mark} $A", special_tokens=[(mark, tokens.eos_token_id)]
    )
    path = lines(tmp_path / "p", {"prompt": "1+2=", "answer": "3"})
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
        (b"", "is empty; it has to hold a row"),
        (b"\n \n", "is empty; it has to hold a row"),
        (b"\x89PNG\xff\x00", "not UTF-8"),
        (GOOD + b"{prompt\n", "line 2: is not JSON"),
        (GOOD + b"\n[1]\n", "line 3: is not an object"),
        (b'{"answer": "2"}', "line 1: has no prompt; it has answer; set prompts.columns.prompt"),
        (GOOD + b'{"prompt": "x"}', "line 2: has no answer; it has prompt; set prompts.columns.an"),
        (b'{"prompt": 5, "answer": "2"}', "line 1: prompt = 5: must be text"),
        (b'{"prompt": [], "answer": "2"}', "line 1: prompt"),
        (b'{"prompt": [{"role": "user"}], "answer": "2"}', "line 1: prompt"),
        (b'{"prompt": "x", "answer": 2.0}', 'line 1: answer = 2.0: must be text; write "2.0"'),
        (b'{"prompt": "x", "answer": true}', "line 1: answer = True: must be text"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_file_and_line(
    tmp_path, tokens, content, message
):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        source(path, tokens)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path, tokens):
    with pytest.raises(ConfigError, match="no such file"):
        source(tmp_path / "none", tokens)
    with pytest.raises(ConfigError, match="is a folder"):
        source(tmp_path, tokens)


def test_sums_are_right_distinct_and_nothing_held_out_is_trained_on(tmp_path):
    arithmetic.write(tmp_path, digits=2, num_train=8000, num_heldout=100, seed=0)
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


def test_the_task_depends_on_the_seed_alone(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        arithmetic.write(tmp_path / name, 3, 50, 10, seed)
    a, b, c = ((tmp_path / name / "train.jsonl").read_text() for name in "abc")
    assert a == b != c


def test_more_sums_than_there_are_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(ConfigError, match="has 81 sums, 82 were asked for; use more digits"):
        arithmetic.write(tmp_path, 1, 80, 2, 0)


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds no tokenizer"):
        tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match=r"no such folder"):
        tokenizer.load(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer.json: is not JSON"):
        tokenizer.load(tmp_path)
