"""Checks that are left for the job's start: every prompt and document, before the first."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_hpc.config.job_file import load
from relax_hpc.data import tokenizer
from relax_hpc.data.rows import TaskShare
from relax_hpc.errors import ConfigError
from relax_hpc.roles.role import ModelRank
from relax_hpc.roles.rollout import check, prompt_check
from relax_hpc.roles.rollout.row_gate import RowGate
from relax_hpc.roles.sft import document_check
from relax_hpc.roles.sft import loop as sft_task
from relax_hpc.roles.training import build as training
from relax_hpc.runtime.paths import RunPaths

GOOD = {"prompt": "1+1=", "answer": "2"}
SFT = """
name = "run"
model.path = "model"
sft = {train = "train.jsonl", heldout = "heldout.jsonl", batch_size = 7, epochs = 2}
"""


def write(name, records):
    Path(name).write_text(
        "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
    )


def sources_of(config):
    files = prompt_check.read(config)
    return prompt_check.sources_of(config, files, tokenizer.load(Path("model")))


@pytest.fixture
def many(job):
    """3,000 prompts of which the one on line 1,235 does not fit, but is not long in letters."""
    records = [{"prompt": "1" * 30, "answer": "2"} for _ in range(3000)]
    records[1234] = {"prompt": "漢" * 29, "answer": "2"}
    write("train.jsonl", records)
    return load(Path("job.toml"), ["prompts.max_prompt_tokens=60"])


def test_tasks_look_at_different_prompts_and_together_at_all(many):
    sources = sources_of(many)
    [said] = prompt_check.check_sample(many, sources)
    assert "all are checked when the job starts" in said
    found = []
    for rank in range(4):
        try:
            RowGate(many, RunPaths(Path("run")), sources, TaskShare(rank, 4)).settle()
        except ConfigError as error:
            found.append((rank, str(error)))
    [(rank, said)] = found
    assert rank == 1234 // (3000 // 4)
    assert said.startswith("prompts.train: train.jsonl, line 1235: the prompt has ")


def test_check_says_where_the_answer_seems_to_be_in_the_prompt(job):
    asked = [{"role": "user", "content": "1+1="}]
    given = [*asked, {"role": "assistant", "content": "2"}]
    write("train.jsonl", [{"prompt": each, "answer": "2"} for each in (asked, given, "1+1=")])
    config = load(Path("job.toml"))
    [said] = prompt_check.check_sample(config, sources_of(config))
    assert said.startswith("prompts.train: 1 of 3 prompts that were looked at end with what the as")
    write("train.jsonl", [{"prompt": asked, "answer": "2"}])
    assert prompt_check.check_sample(config, sources_of(config)) == []


def test_check_says_where_there_are_fewer_rows_than_are_asked_for_at_once(job):
    write("train.jsonl", [GOOD] * 5)
    write("heldout.jsonl", [GOOD] * 3)

    def said(*settings):
        config = load(Path("job.toml"), [*settings])
        return [*check.few_rows(config, sources_of(config))]

    assert said("schedule.prompts_per_step=5", "eval.heldout.num_prompts=3") == []
    assert said("schedule.prompts_per_step=6", "eval.heldout.num_prompts=4") == [
        "schedule.prompts_per_step = 6: rows in prompts.train: 5, so every step has prompts more "
        "than once",
        "eval.heldout.num_prompts = 4: rows in eval.heldout.path: 3, and all of them are used",
    ]


@pytest.fixture
def documents(job):
    Path("sft.toml").write_text(SFT, encoding="utf-8")
    records = [{"prompt": "1" * 30, "completion": "2"} for _ in range(3000)]
    write("heldout.jsonl", records[:3])
    records[1234] = {"prompt": "漢" * 29, "completion": "2"}
    write("train.jsonl", records)
    return load(Path("sft.toml"), ["sft.max_tokens=60"])


def test_of_many_documents_a_sample_is_checked_and_the_steps_are_counted_all_the_same(documents):
    files = document_check.open_files(documents)
    sizes, tokens = document_check.read(documents, files), tokenizer.load(Path("model"))
    steps, left_out = document_check.check_sample(documents, files, sizes, tokens)
    assert steps == 858  # 2 x 3,000 documents by 7, and the rest
    assert left_out.startswith("checked 1,003 of 3,003 documents; all are checked when the job")
    counted = load(Path("sft.toml"), ["sft.max_tokens=60"])
    by_tokens = counted.sft.model_copy(update={"batch_size": None, "tokens_per_step": 6000})
    counted = counted.model_copy(update={"sft": by_tokens})
    with pytest.raises(ConfigError, match=r"train.jsonl, line 1235: has \d+ tokens"):
        document_check.check_sample(counted, files, sizes, tokens)  # to count, all are read


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_that_finds_a_bad_document_ends_before_anything_is_trained(
    documents, monkeypatch, rank
):
    class BeyondTheCheckError(Exception):
        pass

    def device(local_rank, asked):
        raise BeyondTheCheckError

    monkeypatch.setattr(training, "own_device", device)
    world, task = SimpleNamespace(size=3, rank=rank), SimpleNamespace(local_rank=0, gpus=0)
    expected = ConfigError if rank == 1234 % 3 else BeyondTheCheckError
    with pytest.raises(expected) as found:
        sft_task.main(ModelRank(documents, None, world, task, None))
    assert getattr(found.value, "is_final", False) == (expected is ConfigError)
