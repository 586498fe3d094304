"""`bench modes`: the same lengths in each mode; `bench algorithms`: what fails is a row."""

import runpy
from pathlib import Path
from statistics import mean

import algorithms
import pytest
from algorithms import Result, Trial

from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.cli.bench import modes
from relax_hpc.cli.bench.long_tail import LengthDistribution
from relax_hpc.cli.bench.modes import Mode, ModeFigures, ModeWork
from relax_hpc.config import job_file
from relax_hpc.config.rollout import RolloutConfig
from relax_hpc.environments import registry
from relax_hpc.errors import ConfigError

LENGTHS = LengthDistribution(768.0, 4096)
JOB = """
name = "task"
[model]
path = "no/such/model"
[prompts]
train = "no/such/prompts.jsonl"
[schedule]
num_steps = 1
prompts_per_step = 4
"""


def test_the_sigma_belongs_to_the_mean_and_the_percentile():
    # z = 2.326348; sigma = z - sqrt(z^2 - 2 ln(16/3)) = 2.326348 - sqrt(5.411894 - 3.347953)
    assert LENGTHS.sigma == pytest.approx(0.889706, abs=1e-5)
    # the median: 768 exp(-0.889706^2 / 2) = 768 x 0.67314; one sigma above: x exp(0.889706)
    assert [LENGTHS.quantile(share) for share in (0.5, 0.8413447)] == [517, 1259]
    assert [LENGTHS.quantile(share) for share in (0.99, 0.9999, 1e-15)] == [4096, 4096, 1]


def test_a_length_follows_from_the_seed_of_its_episode():
    # sha256("length/7") = 7f3ec4f9...: 0x7f3ec4f9 / 2^32 = 0.497051, z = -0.007392
    # 517 x exp(0.889706 x -0.007392) = 513.6
    assert LENGTHS.draw(7) == 514


def test_many_draws_have_the_mean_and_the_percentile():
    lengths = LengthDistribution(3072.0, 16384)
    drawn = sorted(lengths.draw(seed) for seed in range(100_000))
    # 3072 Phi(z - sigma) + 0.01 x 16384 = 3072 x 0.92459 + 163.84, as the longest are cut
    assert mean(drawn) == pytest.approx(3004, rel=0.01)
    assert drawn[99_000] == pytest.approx(16384, rel=0.05)
    assert drawn[50_000] == pytest.approx(2068, rel=0.01)
    assert drawn[-1] == 16384


@pytest.mark.parametrize("p99", [768, 11_496])
def test_lengths_that_no_distribution_has_are_refused(p99, tmp_path):
    with pytest.raises(ConfigError, match=f"--p99 {p99}: .* up to 11495"):
        LengthDistribution(768.0, p99).write(tmp_path)


def test_the_environment_that_is_written_has_the_lengths(tmp_path):
    name = LENGTHS.write(tmp_path)
    assert registry.make(RolloutConfig(environment=name)).lengths == LENGTHS
    assert runpy.run_path(str(tmp_path / "lengths.py"))["Drawn"].lengths == LENGTHS


def made(mode, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return modes.job_of(Mode(mode), ModeWork(LENGTHS, 1, 6), path, tmp_path, [])


def test_modes_differ_in_lag_and_gpus_only(tmp_path):
    trees = {mode: made(mode, tmp_path).model_dump(mode="json") for mode in modes.MODES}
    lags = [trees[mode]["schedule"].pop("max_staleness") for mode in modes.MODES]
    assert lags == [0, 0, 1, 2]
    colocated = trees["colocate"]
    assert colocated["engines"]["rollout"]["placement"] == "actor"
    # one engine and one rank: two of each take turns
    assert colocated["engines"]["rollout"]["count"] == 2
    assert colocated["actor"]["layout"]["data_parallel"] == 2
    for tree in trees.values():
        del tree["name"], tree["schedule"]["num_steps"], tree["actor"]["save_every"]
    assert trees["staleness-0"] == trees["staleness-1"] == trees["staleness-2"]
    for section in ("algorithm", "model", "prompts", "reward", "rollout", "schedule", "weights"):
        assert colocated[section] == trees["staleness-0"][section], section
    assert colocated["rollout"]["max_new_tokens"] == 4096


def test_a_mode_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="--mode colocated: there is none; use colocate or"):
        modes.modes_of(["colocated"])


def test_a_job_that_is_colocated_already_is_refused(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB + '[engines.rollout]\nplacement = "actor"\n')
    with pytest.raises(ConfigError, match="use 'own'"):
        shared = ["schedule.max_staleness=0"]
        assert job_file.load(path, shared)
        modes.job_of(Mode("staleness-1"), ModeWork(LENGTHS, 1, 6), path, tmp_path, shared)


def test_the_factor_is_of_equal_work_only():
    base = ModeFigures("colocate", num_tokens=100, step_s=9.0)
    same = ModeFigures("staleness-1", num_tokens=100, step_s=4.5)
    other = ModeFigures("staleness-2", num_tokens=101, step_s=4.5)
    failed = ModeFigures("staleness-0", failure="ended | early")
    results = [base, failed, same, other]
    assert [modes.speedup(each, results) for each in results] == [1.0, None, 2.0, None]
    table = modes.markdown(results).splitlines()
    assert "failed: ended / early" in table[3]
    assert "other work: 101 tokens" in table[5]
    assert {line.count("|") for line in table} == {table[0].count("|")}


@pytest.mark.parametrize(("mode", "steps"), [("staleness-1", 3), ("staleness-2", 4)])
def test_a_part_of_the_batches_that_are_ready_at_a_time_is_not_measured(mode, steps, tmp_path):
    path = tmp_path / "no.toml"  # refused before it is read
    with pytest.raises(ConfigError, match=rf"--steps {steps}: in {mode} .* e\.g\. 6"):
        modes.job_of(Mode(mode), ModeWork(LENGTHS, 1, steps), path, tmp_path, [])


REPOSITORY = Path(__file__).parents[2]
PRESET = next(iter(algorithms.PRESETS))


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
    with pytest.raises(ConfigError, match=r"--preset nothing: is none of .*" + PRESET):
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
