"""Whatever is wrong with a job of supervised fine-tuning, one line says so and nothing starts."""

import json
from pathlib import Path

import pytest

JOB = """
name = "run"
run_root = "runs"
[model]
path = "model"
dtype = "float32"
[sft]
train = "train.jsonl"
heldout = "heldout.jsonl"
batch_size = 2
epochs = 3
"""
GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.fixture
def job(job):
    Path("job.toml").write_text(JOB, encoding="utf-8")
    for name in ("train", "heldout"):
        Path(f"{name}.jsonl").write_text((json.dumps(GOOD) + "\n") * 5, encoding="utf-8")
    return job


def submit(refused, *settings):
    """Submits what must be refused; what was said on stderr."""
    overrides = [word for setting in settings for word in ("--set", setting)]
    return refused("submit", "job.toml", "--local", *overrides)


SETTINGS = {
    "sft.tokens_per_step=9": "takes either batch_size or tokens_per_step; set one of them",
    "engines.rollout.count=1": "a job with [sft] has no rollout and does not take it",
    "actor.resources.nodes=2": "data_parallel) = 1: does not divide over 2 nodes",
    "sft.max_tokens=7": "train.jsonl, line 1: has 10 tokens, sft.max_tokens = 7; raise it, set",
    "actor.tokens_per_micro_batch=7": "the longest document has 10 tokens; use 10 or more",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_fine_tuning_that_cannot_work_is_answered_in_one_line(refused, setting):
    said = submit(refused, setting)
    assert SETTINGS[setting] in said and "\n" not in said


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_documents_of_which_nothing_is_left_are_refused(refused, name):
    long = {"prompt": "1+" * 30, "completion": "a"}
    Path(f"{name}.jsonl").write_text((json.dumps(long) + "\n") * 2, encoding="utf-8")
    assert submit(refused, "sft.max_tokens=20", "sft.too_long=truncate") == (
        f"sft.{name}: sft.max_tokens = 20 leaves no document a token of the assistant; raise it"
    )


def turns(*pairs):
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


LINES = {
    "has neither messages nor prompt": {"text": "a"},
    "has no completion": {"prompt": "q"},
    "has no assistant turn to train on": turns(("user", "q")),
    "message 2 has role = 'asistant'; roles are": turns(("user", "q"), ("asistant", "a")),
    "message 2 has content = None; it must be text": {
        "messages": [GOOD["messages"][0], {"role": "assistant"}]
    },
    "messages = 'hi': must be a list": {"messages": "hi"},
}  # fmt: skip


@pytest.mark.parametrize("said", LINES)
def test_a_line_that_cannot_be_trained_on_is_named(refused, said):
    lines = f"{json.dumps(GOOD)}\n\n{json.dumps(LINES[said])}\n"
    Path("heldout.jsonl").write_text(lines, encoding="utf-8")
    answer = submit(refused)
    where = f"sft.heldout: {Path('heldout.jsonl').absolute()}, line 3"
    assert answer.startswith(where) and said in answer and "\n" not in answer
