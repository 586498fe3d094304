"""Rank 0 of a supervised fine-tuning: who trains what, and from where a resume goes on."""

import json

import pytest

from relax_hpc.cli.demo import models
from relax_hpc.config.run import SftRunConfig
from relax_hpc.data.documents import Documents
from relax_hpc.data.order import VERSION
from relax_hpc.errors import ConfigError
from relax_hpc.roles.sft.loop import DataPosition, SftRank0
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter, read_events
from relax_hpc.runtime.telemetry.timers import Timers

COUNT = 10


@pytest.fixture
def make(tmp_path):
    """Makes a rank0 of a run over ten documents, 4 a step, dealt to 2 ranks."""

    def rank0(position=None, count=COUNT, **sft):
        lines = [{"prompt": "q" * n, "completion": "a"} for n in range(1, count + 1)]
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        config = SftRunConfig.model_validate({
            "name": "run", "run_root": str(tmp_path), "model": {"path": "unused"},
            "sft": {"train": str(path), "batch_size": 4, "num_steps": 5, "epochs": 2} | sft,
            "actor": {"layout": {"data_parallel": 2}, "tokens_per_micro_batch": 32},
        })  # fmt: skip
        documents = Documents(path, models.tokenizer(), config.sft)
        paths = RunPaths(tmp_path / "run")
        events = EventWriter(paths.events("actor", 0), "actor", 0)
        return SftRank0(config, paths, documents, [], events, position)

    return rank0


def lines(shares):
    return sorted(row.guid for share in shares for row in share.rows)


def test_whoever_goes_on_from_a_position_is_dealt_the_same(make):
    rank0, dealt, positions = make(), [], []
    for _ in range(5):
        positions.append(rank0.position)
        dealt.append(lines(rank0.next_task(1, Timers())))
    assert positions == [(0, 0, 10, 2), (0, 4, 10, 2), (0, 8, 10, 2), (1, 2, 10, 2), (1, 6, 10, 2)]
    assert rank0.position == (2, 0, 10, 2)
    assert [len(batch) for batch in dealt] == [4] * 5
    assert sorted(line for batch in dealt for line in batch) == sorted([*range(COUNT)] * 2)
    for position, batch in zip(positions, dealt, strict=True):
        kept = DataPosition(*json.loads(json.dumps(position)))
        assert lines(make(kept).next_task(1, Timers())) == batch


def test_a_file_that_was_changed_meanwhile_is_refused(make):
    with pytest.raises(ConfigError, match=r"has 9 documents, the checkpoint was made with 10;"):
        make(DataPosition(0, 4, COUNT, VERSION), count=9)


def test_a_checkpoint_of_an_older_order_is_refused_unless_the_order_is_the_files(make):
    older = DataPosition(0, 4, COUNT)
    with pytest.raises(ConfigError, match=r"in order 1 of the documents, .* has order 2; go on wi"):
        make(older)
    assert make(older, shuffle_seed=None).position == (0, 4, COUNT, 2)


def test_what_was_cut_and_what_was_left_out_is_counted(make, tmp_path):
    # 6 tokens and the question, of 1 to 10, are before an answer of 2 and a line break: of question
    # 8 the line break is cut, of 9 half the answer, of 10 all of it.
    rank0 = make(max_tokens=16, too_long="truncate", batch_size=COUNT, num_steps=1)
    shares = rank0.next_task(1, Timers())
    assert lines(shares) == list(range(9))
    rank0.end_step(1, {"loss": 1.0}, Timers())
    step, _ = read_events(tmp_path / "run" / "events")
    assert (step["data/truncated"], step["data/left_out"], step["num_documents"]) == (3, 1, 9)
    assert step["num_trained_tokens"] == 8 * 2 + 1
    assert step["data/epoch"] == 1.0
