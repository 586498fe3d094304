"""Benches: work that is the same in all ways, figures by hand, and real engines and ranks."""

import media_towers
import pytest

from relax_hpc.cli.bench import generate
from relax_hpc.cli.bench.generate import Trial, TrialLoad
from relax_hpc.trainer.megatron.costs import training_flops
from relax_hpc.trainer.models.architecture import Architecture


def test_operations_are_those_counted_by_hand():
    """One layer of width 4: queries 2 x 3, keys 1 x 3, feed-forward 5, vocabulary 7."""
    shape = Architecture("qwen3", 1, 4, 5, 2, 1, 3, 7, 99, 1e-6, 1e4, False)
    weights = 4 * 6 + 2 * (4 * 3) + 6 * 4 + 3 * (4 * 5) + 4 * 7
    # Scores and values: 2 products of 2 x 3 x length^2 operations a head, half of them seen.
    attention = 3 * 2 * 2 * (2 * 3) * (2**2 + 4**2) / 2
    assert training_flops(shape, [2, 4]) == 6 * weights * 6 + attention


def test_the_ratio_is_the_median_of_those_within_a_round():
    speeds = {"ours": [100.0, 90.0, 80.0], "plain": [100.0, 100.0, 100.0]}
    speeds["streamed"] = [50.0, 45.0, 20.0]
    trials = [Trial(way, speed, 0.01) for way, found in speeds.items() for speed in found]
    plain, streamed, *cpu = generate.rows(trials, TrialLoad(4, 10, 4, 5, 8))
    assert (plain.value, plain.baseline, plain.ratio) == (90.0, 100.0, 0.9)
    assert (streamed.baseline, streamed.ratio) == (45.0, 2.0)
    assert [row.value for row in cpu] == [10.0] * 3


def test_all_ways_get_all_tokens_of_a_real_engine(checkpoints):
    load = TrialLoad(in_flight=16, num_requests=24, siblings=4, prompt_tokens=5, new_tokens=8)
    trials = generate.measure(
        str(checkpoints[0]), kind="embedded", load=load, repeats=2, overrides=[]
    )
    first, second = ["ours", "plain", "streamed"], ["plain", "streamed", "ours"]
    assert [trial.way for trial in trials] == first + second
    assert all(trial.tokens_per_s > 0 for trial in trials)


@pytest.mark.long
def test_a_tower_computes_what_hugging_faces_does():
    work = media_towers.Work([(2, (64, 96))], (5, (64, 64)), tower_patches=32, repeats=1)
    found = {row.name: row for row in media_towers.measure("tiny", work)}
    assert 0 < found["largest difference from Hugging Face's features"].value < 2e-6
