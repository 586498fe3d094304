"""Figures of an evaluation: means over prompts, their errors, and subsets."""

import math
import random
import statistics as reference

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.evaluation.statistics import Figure, Sample, by_source, clustered, statistics


def samples_of(scores, answers=None):
    """Samples of prompts by their scores; answers alike, or `wrong` throughout."""
    return [
        Sample(prompt, score, is_truncated=score < 0, answer=(answers or {}).get((prompt, n), "w"))
        for prompt, each in enumerate(scores)
        for n, score in enumerate(each)
    ]


def test_figures_worked_by_hand():
    found = statistics(samples_of([[1, 0, 0, -1], [1, 1, 1, 0]]), [1, 2, 4])
    assert (found.num_prompts, found.num_samples) == (2, 8)
    assert found.mean == (0.375, pytest.approx(0.375))  # 0 and 0.75
    assert found.truncated == (0.125, pytest.approx(0.125))
    assert found.pass_at[1].value == found.pass_all[1].value == pytest.approx(0.5)
    assert found.pass_at[2].value == pytest.approx((1 / 2 + 1) / 2)
    assert found.pass_all[2] == (pytest.approx((0 + 1 / 2) / 2), pytest.approx(0.25))
    assert found.pass_at[4] == (1.0, 0.0) and found.pass_all[4] == (0.0, 0.0)
    assert found.majority_at[4] == (0.5, pytest.approx(0.5))
    assert found.majority_draws == {1: 0.0, 2: 0.0, 4: 0.0}


def test_wrong_answers_vote_apart_and_silent_samples_do_not_vote():
    one = [[1, 1, 0, 0, 0]]
    together = statistics(samples_of(one), [5])
    apart = statistics(samples_of(one, {(0, 2): "7", (0, 3): "8"}), [5])
    silent = statistics(samples_of(one, {(0, 2): None, (0, 3): None}), [5])
    found = [each.majority_at[5].value for each in (together, apart, silent)]
    assert found == [0.0, 1.0, 1.0]
    assert together.mean.error is together.majority_at[5].error is None  # a single prompt


def test_there_is_no_majority_where_no_wrong_answer_can_be_told():
    nothing = {(0, n): None for n in range(3)}
    assert statistics(samples_of([[1, 0, 0]], nothing), [3]).majority_at == {}
    assert statistics(samples_of([[1, 1, 1]], nothing), [3]).majority_at[3].value == 1.0
    # A box here and there is no vote, where what is right is in none; half of it may lack one.
    chance = nothing | {(0, 2): "7"}
    assert statistics(samples_of([[1, 1, 0]], chance), [3]).majority_at == {}
    chance[0, 0] = "w"
    assert statistics(samples_of([[1, 1, 0]], chance), [3]).majority_at[3].value == 1.0


def test_a_sample_is_right_from_a_given_score_on_and_rounding_does_not_matter():
    scores = [[0.1 + 0.2 + 0.7 - 2e-16, 0.9, -1.0]]
    assert statistics(samples_of(scores), [1]).pass_at[1].value == pytest.approx(1 / 3)
    assert statistics(samples_of(scores), [1], right=0.9).pass_at[1].value == pytest.approx(2 / 3)


def test_the_error_is_that_of_simulated_evaluations_where_samples_of_a_prompt_are_alike():
    """Prompts of one or four samples; each has a chance of its own, so siblings are correlated."""
    draw, means, errors, naive = random.Random(0), [], [], []
    for _ in range(2000):
        clusters = []
        for prompt in range(40):
            chance = draw.choice([0.05, 0.95])
            clusters.append([float(draw.random() < chance) for _ in range(4 if prompt % 4 else 1)])
        figure = clustered(clusters)
        means.append(figure.value)
        errors.append(figure.error**2)
        naive.append(figure.value * (1 - figure.value) / sum(map(len, clusters)))
    spread = reference.variance(means)
    assert reference.mean(errors) == pytest.approx(spread, rel=0.1)
    assert reference.mean(naive) < 0.5 * spread


def test_the_error_of_pass_at_k_and_majority_is_that_of_simulated_evaluations():
    draw, found = random.Random(1), []
    for _ in range(400):
        scores = []
        for _ in range(30):
            chance = draw.choice([0.2, 0.7])
            scores.append([float(draw.random() < chance) for _ in range(4)])
        found.append(statistics(samples_of(scores), [3]))
    for name in ("pass_at", "pass_all", "majority_at"):
        figures = [getattr(each, name)[3] for each in found]
        spread = reference.stdev([figure.value for figure in figures])
        error = math.sqrt(reference.mean([figure.error**2 for figure in figures]))
        assert error == pytest.approx(spread, rel=0.15), name


def test_clusters_of_one_size_have_the_error_of_their_means():
    clusters = [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    error = reference.stdev([0.5, 1.0, 0.0]) / math.sqrt(3)
    assert clustered(clusters) == Figure(0.5, pytest.approx(error))


def test_the_order_of_samples_does_not_matter():
    samples = samples_of([[1, 0, 0.5], [0, 0, 1], [1, 1, 1]])
    shuffled = random.Random(0).sample(samples, len(samples))
    assert statistics(shuffled, [1, 3]) == statistics(samples, [1, 3])


def test_subsets_are_told_apart():
    samples = [Sample(n, float(n), False, source=source) for n, source in enumerate("bab")]
    found = by_source(samples)
    assert list(found) == ["a", "b"]
    assert [sample.prompt for sample in found["b"]] == [0, 2]


def test_a_k_above_the_samples_of_a_prompt_is_refused_and_the_prompt_named():
    with pytest.raises(ConfigError, match=r"prompt 1: k = 3: there are 2 samples"):
        statistics(samples_of([[1, 1, 1], [0, 1]]), [1, 3])
    with pytest.raises(ConfigError, match="need a sample"):
        statistics([], [1])
