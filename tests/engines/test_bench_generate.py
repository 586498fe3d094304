"""The benchmark of generation: same work for all ways of asking, and what the ratio is of."""

import pytest

from relax_hpc.cli.bench import generate
from relax_hpc.cli.bench.generate import Trial, TrialLoad


def test_turns_ask_for_the_same_lengths_with_prompts_of_their_own():
    load = TrialLoad(in_flight=4, num_requests=10, siblings=4, prompt_tokens=5, new_tokens=8)
    one, two = load.requests(1), load.requests(2)
    assert [count for _, count in one] == [count for _, count in two]
    assert all(4 <= count < 12 for _, count in one)
    assert len({tuple(prompt) for prompt, _ in one}) == 3  # groups of 4, 4 and 2
    assert not {tuple(prompt) for prompt, _ in one} & {tuple(prompt) for prompt, _ in two}


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


def test_ways_that_were_left_out_have_no_rows():
    trials = [Trial("ours", 90.0, 0.01), Trial("plain", 100.0, 0.02)]
    plain, *cpu = generate.rows(trials, TrialLoad(4, 10, 4, 5, 8))
    assert plain.ratio == 0.9
    assert [(row.name, row.value) for row in cpu] == [
        ("client's CPU, ours", 10.0),
        ("client's CPU, plain", 20.0),
    ]


def test_a_shape_nobody_knows_is_named():
    load = TrialLoad(1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="--shape nothing"):
        generate.measure("nothing", kind="embedded", load=load, repeats=1, overrides=[])
