"""`bench algorithms`: what is done is not done again, and what fails is a row."""

from pathlib import Path

import pytest

from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.bench import algorithms
from relax_hpc.bench.algorithms import Result, Trial
from relax_hpc.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
PRESET = next(iter(algorithms.PRESETS))

JOB = """
name = "task"
[model]
path = "no/such/model"
[prompts]
train = "no/such/prompts.jsonl"
[schedule]
num_steps = 1
"""


def test_a_failure_is_a_row_and_what_is_done_is_not_done_again(tmp_path):
    job, folder = tmp_path / "job.toml", tmp_path / "results"
    job.write_text(JOB)
    wanted = algorithms.trials([PRESET], [1, 4], 3)
    said = []
    (one,) = algorithms.measure(wanted[:1], job, folder, limit_s=1, say=said.append)
    assert "no/such" in one.failure
    assert said[0] == f"{wanted[0].name}: begins"
    job.unlink()
    again, other = algorithms.measure(wanted, job, folder, limit_s=1)
    assert again == one
    assert (other.lag, "job.toml" in other.failure) == (4, True)
    table = algorithms.markdown([again, other]).splitlines()
    assert len(table) == 4
    assert table[2].startswith(f"| `{PRESET}` | 1 |")
    assert "failed: " in table[2]
    assert all(line.count(" | ") == table[0].count(" | ") for line in table[2:])


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError, match=r"--preset nothing: there is none; use .*" + PRESET):
        algorithms.trials(["nothing"], [1], 1)


def test_all_presets_are_tried_unless_some_are_named():
    assert [trial.preset for trial in algorithms.trials([], [2], 5)] == list(algorithms.PRESETS)


@pytest.mark.parametrize("trial", algorithms.trials([], [1, 4], 100), ids=lambda one: one.name)
def test_every_preset_is_tried_as_it_is(trial, tmp_path):
    config = algorithms.task(trial, REPOSITORY / "jobs" / "demo.toml", tmp_path)
    assert config.algorithm == algorithm_of(preset=trial.preset)
    assert config.run_dir == tmp_path / trial.name
    assert (config.schedule.max_staleness, config.num_steps) == (trial.lag, 100)


def evaluation(when, number, version, correct, time):
    return {
        "event": "eval", "name": "heldout", "when": when, "number": number, "version": version,
        "rank": 0, "headline": True, "correct": correct, "num_samples": 10, "time": time,
    }  # fmt: skip


def test_the_figures_of_a_run_by_hand(tmp_path):
    events = [
        evaluation("before", 0, 0, 5, 60.0),
        {"event": "step", "step": 1, "time": 90.0, "loss/clip_fraction": 0.1, "staleness/mean": 0,
         "loss/effective_sample": 0.75},
        {"event": "step", "step": 2, "time": 99.0, "loss/masked_fraction": 0.3,
         "staleness/mean": 1.0},
        evaluation("during", 1, 2, 9, 120.0),
        evaluation("after", 2, 4, 10, 240.0),
    ]  # fmt: skip
    progress = {"heldout_before": 0.5, "heldout_after": 1.0}
    result = algorithms._result(Trial("async", 4, 4), events, progress)
    assert result == Result("async", 4, 4, 0.5, 1.0, 2, pytest.approx(0.2), 0.5, 0.75, 3.0)
    row = "| `async` | 4 | 0.500 | 1.000 | 2 | 20.0 % | 0.750 | 0.500 | 3.0 |  |"
    assert algorithms.markdown([result]).splitlines()[-1] == row
    failed = Result("dapo", 4, 4, failure="it broke | off")
    assert "failed: it broke / off" in algorithms.markdown([failed])
    path = algorithms.plot([result, failed], tmp_path / "rewards.png", "title")
    assert path.read_bytes()[:4] == b"\x89PNG"
