"""`bench modes`: the same lengths in each mode, from the distribution that was asked for."""

import runpy
from statistics import mean

import pytest

from relax_hpc import job_file
from relax_hpc.bench.modes import figures, jobs
from relax_hpc.bench.modes.figures import Figures
from relax_hpc.bench.modes.jobs import Mode, Work
from relax_hpc.bench.modes.long_tail import Lengths
from relax_hpc.config.rollout import RolloutConfig
from relax_hpc.environments import registry
from relax_hpc.errors import ConfigError

LENGTHS = Lengths(768.0, 4096)
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
    lengths = Lengths(3072.0, 16384)
    drawn = sorted(lengths.draw(seed) for seed in range(100_000))
    # 3072 Phi(z - sigma) + 0.01 x 16384 = 3072 x 0.92459 + 163.84, as the longest are cut
    assert mean(drawn) == pytest.approx(3004, rel=0.01)
    assert drawn[99_000] == pytest.approx(16384, rel=0.05)
    assert drawn[50_000] == pytest.approx(2068, rel=0.01)
    assert drawn[-1] == 16384


@pytest.mark.parametrize("p99", [768, 11_496])
def test_lengths_that_no_distribution_has_are_refused(p99, tmp_path):
    with pytest.raises(ConfigError, match=f"--p99 {p99}: .* up to 11495"):
        Lengths(768.0, p99).write(tmp_path)


def test_the_environment_that_is_written_has_the_lengths(tmp_path):
    name = LENGTHS.write(tmp_path)
    assert registry.make(RolloutConfig(environment=name)).lengths == LENGTHS
    assert runpy.run_path(str(tmp_path / "lengths.py"))["Drawn"].lengths == LENGTHS


def made(mode, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return jobs.job(Mode(mode), Work(LENGTHS, 1, 6), path, tmp_path, [])


def test_modes_differ_in_lag_and_gpus_only(tmp_path):
    trees = {mode: made(mode, tmp_path).model_dump(mode="json") for mode in jobs.MODES}
    lags = [trees[mode]["schedule"].pop("max_staleness") for mode in jobs.MODES]
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
        jobs.modes(["colocated"])


def test_a_job_that_is_colocated_already_is_refused(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB + '[engines.rollout]\nplacement = "actor"\n')
    with pytest.raises(ConfigError, match="use 'own'"):
        shared = ["schedule.max_staleness=0"]
        assert job_file.load(path, shared)
        jobs.job(Mode("staleness-1"), Work(LENGTHS, 1, 6), path, tmp_path, shared)


def test_the_factor_is_of_equal_work_only():
    base = Figures("colocate", num_tokens=100, step_s=9.0)
    same = Figures("staleness-1", num_tokens=100, step_s=4.5)
    other = Figures("staleness-2", num_tokens=101, step_s=4.5)
    failed = Figures("staleness-0", failure="ended | early")
    results = [base, failed, same, other]
    assert [figures.speedup(each, results) for each in results] == [1.0, None, 2.0, None]
    table = figures.markdown(results).splitlines()
    assert "failed: ended / early" in table[3]
    assert "other work: 101 tokens" in table[5]
    assert {line.count("|") for line in table} == {table[0].count("|")}


@pytest.mark.parametrize(("mode", "steps"), [("staleness-1", 3), ("staleness-2", 4)])
def test_a_part_of_the_batches_that_are_ready_at_a_time_is_not_measured(mode, steps, tmp_path):
    path = tmp_path / "no.toml"  # refused before it is read
    with pytest.raises(ConfigError, match=rf"--steps {steps}: in {mode} .* e\.g\. 6"):
        jobs.job(Mode(mode), Work(LENGTHS, 1, steps), path, tmp_path, [])
