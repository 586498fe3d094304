"""Prompts, answers and chat templates that cannot work: one line with file and line."""

import json
import os
import socket
from pathlib import Path

import pytest

from relax_hpc.data.tokenizer import load
from relax_hpc.trainer.models.registry import read_architecture

GOOD = json.dumps({"prompt": "1+1=", "answer": "2"})
PROMPTS = {
    '{"prompt": "\\ud800", "answer": "2"}': r"has \ud800, half of a character; write the",
    '{"prompt": "", "answer": "2"}': "the prompt is empty; write one, or remove the line",
    '{"prompt": null, "answer": "2"}': "prompt = None: must be text, or messages of",
    '{"prompt": [{"role": "user", "content": ["x"]}], "answer": "2"}': "must be text, or messages",
    '{"prompt": "x", "answer": NaN}': "answer = nan: must be text, a number or a list of one",
    '{"Prompt": "x", "answer": "2"}': "has no prompt; it has Prompt, answer; set ",
    f'{{"prompt": {json.dumps("x" * 5000)}, "answer": "2"}}': "has 5006 tokens, prompts.max_prom",
}


@pytest.mark.parametrize("line", PROMPTS, ids=lambda line: line[:50])
@pytest.mark.parametrize("key", ["train", "heldout"])
def test_a_line_that_is_no_prompt_is_named_as_editors_count(refused, key, line):
    Path(f"{key}.jsonl").write_text(f"{GOOD}\n\n  \n{line}\n{GOOD}\n", encoding="utf-8")
    said = refused("submit", "job.toml", "--local")
    setting = {"train": "prompts.train", "heldout": "eval.heldout.path"}[key]
    assert said.startswith(f"{setting}: {Path(f'{key}.jsonl').absolute()}, line 4: ")
    assert PROMPTS[line] in said and "\n" not in said and len(said) < 500


SFT = """
name = "run"
model = { path = "model", dtype = "float32" }
sft = { train = "train.jsonl", batch_size = 1, num_steps = 1 }
"""


@pytest.mark.parametrize("more", [None, SFT], ids=["prompts", "documents"])
def test_a_token_that_the_model_has_not_is_named_with_its_line(refused, more):
    """Tokens were added to the tokenizer alone."""
    tokens = load(Path("model"))
    free = read_architecture(Path("model")).vocab_size - len(tokens)
    tokens.add_tokens([f"<|new{n}|>" for n in range(free + 1)])
    tokens.save_pretrained("model")
    if more:
        Path("job.toml").write_text(more, encoding="utf-8")
    rows = [{"prompt": f"<|new{n}|>", "answer": "2"} for n in (free - 1, free)]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    said = refused("submit", "job.toml", "--local")
    assert f"train.jsonl, line 2: has token {len(tokens) - 1} " in said
    assert f"('<|new{free}|>'), and the model has {len(tokens) - 1} (vocab_size" in said


@pytest.mark.parametrize("answer", ["1/2", "", "1,00"])
def test_an_answer_that_the_reward_can_never_match_is_refused_with_line_and_count(refused, answer):
    lines = [GOOD, "", json.dumps({"prompt": "x", "answer": answer}), GOOD] * 2
    Path("train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    said = refused("submit", "job.toml", "--local")
    assert said == (
        f"prompts.train: {Path('train.jsonl').absolute()}, line 3: answer = {answer!r}: can never "
        "be matched; with reward.name = 'boxed_number' write a plain number, like 75, -0.5 or "
        "1,000, or remove the line (2 of 6 answers are so; "
        'prompts.bad_rows = "skip" leaves them out)'
    )
    short = ("--set", "prompts.max_prompt_tokens=2")  # which is looked at next
    any_answer = ("--set", "reward.name=random")
    assert "prompts.max_prompt_tokens" in refused("check", "job.toml", *short, *any_answer)
    good = [json.dumps({"prompt": "x", "answer": each}) for each in (" 75 ", "-0.5", "+1,000.25")]
    Path("train.jsonl").write_text("\n".join(good), encoding="utf-8")
    assert "prompts.max_prompt_tokens" in refused("check", "job.toml", *short)


def test_how_many_rows_cannot_be_used_is_said_and_what_leaves_them_out(refused):
    said = {}
    bad = json.dumps({"prompt": [], "answer": "2"})
    for name, lines in {
        "one": [GOOD, bad, GOOD],
        "some": [GOOD, bad, "no JSON", json.dumps({"prompt": "x", "answer": "two"}), GOOD],
        "all": [bad] * 2,
        "far too many": [bad] * 3000 + [GOOD],
    }.items():
        Path("train.jsonl").write_text("\n".join(lines), encoding="utf-8")
        said[name] = refused("check", "job.toml", "--local")
    assert said["one"].endswith('(the only one of 3; prompts.bad_rows = "skip" leaves it out)')
    assert said["some"].endswith('(3 of 5 rows are so; prompts.bad_rows = "skip" leaves them out)')
    assert "bad_rows" not in said["all"] and "bad_rows" not in said["far too many"]
    Path("train.jsonl").write_text(GOOD, encoding="utf-8")
    long = refused("check", "job.toml", "--local", "--set", "prompts.max_prompt_tokens=2")
    assert long.endswith('or remove the line; prompts.bad_rows = "skip" leaves such lines out')


TEMPLATES = {
    "{{ raise_exception('roles must\nalternate') }}": "train.jsonl, line 1: the chat template "
    "refuses it: roles must (JINJA, line 1); correct the roles or their order",
    "{% for m in messages %}\n{{ m.role ": "JINJA, line 2: the chat template is no valid one: un",
    "{{ 1 }}\n{{ nowhere.known }}": "JINJA, line 2: the chat template fails: UndefinedError: ",
    "{{ messages.__class__.__mro__ }}": "JINJA, line 1: the chat template fails: SecurityError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "the chat template fails: RecursionError",
    "{{ range(1000000000) | list }}": "JINJA, line 1: the chat template fails: OverflowError",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_that_fails_is_named_by_file_and_line(refused, template):
    Path("model/chat_template.jinja").write_text("{#- Begin #}" + template, encoding="utf-8")
    said = refused("submit", "job.toml", "--local")
    where = str(Path("model/chat_template.jinja").absolute())
    assert TEMPLATES[template].replace("JINJA", where) in said and "\n" not in said
    assert "no valid one" in said or f"{Path('train.jsonl').absolute()}, line 1" in said


KINDS = {
    "pipe": (os.mkfifo, "is a pipe; name"),
    "socket": (None, "is a socket or a device; name"),
    "device": (None, "is a device; name"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "no such file; name"),
    "gzip": (lambda path: path.write_bytes(b"\x1f\x8b\x08\0"), "is compressed (gzip), unpack it"),
    "utf-16": (lambda path: path.write_text(GOOD, "utf-16"), "is UTF-16 text, save it as UTF-8"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["job.toml", "train.jsonl", "heldout.jsonl"])
@pytest.mark.timeout(60)
def test_what_is_no_file_of_text_is_refused_and_nothing_waits_for_it(refused, name, kind):
    make, message = KINDS[kind]
    path = Path(name)
    path.unlink()
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(name)
    else:
        make(path)
    said = refused("submit", "job.toml", "--local")
    assert name in said and message in said and "\n" not in said
