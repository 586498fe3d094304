"""`bench modes`: the same lengths in each mode; `bench algorithms`: what fails is a row."""

import algorithms
import pytest
from algorithms import Result, Trial

from relax_hpc.cli.bench import modes
from relax_hpc.cli.bench.long_tail import LengthDistribution
from relax_hpc.cli.bench.modes import ModeFigures

LENGTHS = LengthDistribution(768.0, 4096)


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
