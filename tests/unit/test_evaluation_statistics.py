"""Figures of an evaluation: means over prompts, their errors, and subsets; pass@k, pass^k and maj@k
of a prompt equal what listing every draw gives."""

import itertools
import math
import random
import statistics as reference
from collections import Counter
from fractions import Fraction

import pytest

from relax_hpc.algorithms import statistics as module
from relax_hpc.algorithms.statistics import (
    ScoredResponse,
    Votes,
    estimate_clustered,
    majority_at_k,
    pass_all_k,
    pass_at_k,
    statistics,
)  # fmt: skip


def samples_of(scores, answers=None):
    """Samples of prompts by their scores; answers alike, or `wrong` throughout."""
    return [
        ScoredResponse(
            prompt, score, is_truncated=score < 0, answer=(answers or {}).get((prompt, n), "w")
        )
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


def test_the_error_is_that_of_simulated_evaluations_where_samples_of_a_prompt_are_alike():
    """Prompts of one or four samples; each has a chance of its own, so siblings are correlated."""
    draw, means, errors, naive = random.Random(0), [], [], []
    for _ in range(2000):
        clusters = []
        for prompt in range(40):
            chance = draw.choice([0.05, 0.95])
            clusters.append([float(draw.random() < chance) for _ in range(4 if prompt % 4 else 1)])
        figure = estimate_clustered(clusters)
        means.append(figure.value)
        errors.append(figure.error**2)
        naive.append(figure.value * (1 - figure.value) / sum(map(len, clusters)))
    spread = reference.variance(means)
    assert reference.mean(errors) == pytest.approx(spread, rel=0.1)
    assert reference.mean(naive) < 0.5 * spread


@pytest.mark.parametrize("n", range(1, 10))
def test_pass_at_k_and_pass_all_k_are_what_listing_the_draws_gives(n):
    for k in range(1, n + 1):
        highest = Counter(map(max, itertools.combinations(range(n), k)))
        lowest = Counter(map(min, itertools.combinations(range(n), k)))
        draws = math.comb(n, k)
        for c in range(n + 1):  # the right samples are those from n - c on
            some = sum(count for last, count in highest.items() if last >= n - c)
            every = sum(count for first, count in lowest.items() if first >= n - c)
            assert pass_at_k(n, c, k) == pytest.approx(some / draws, abs=1e-12), (c, k)
            assert pass_all_k(n, c, k) == pytest.approx(every / draws, abs=1e-12), (c, k)


def listed(votes, k):
    """maj@k by looking at every draw."""
    groups = ["right"] * votes.right + [None] * votes.silent
    for number, count in enumerate(votes.wrong):
        groups += [number] * count
    won = Fraction(0)
    for drawn in itertools.combinations(groups, k):
        said = Counter(answer for answer in drawn if answer is not None)
        top = max(said.values(), default=0)
        if top and said["right"] == top:
            won += Fraction(1, sum(count == top for count in said.values()))
    return float(won / math.comb(len(groups), k))


def partitions(total, most):
    if total == 0:
        yield ()
    for first in range(min(total, most), 0, -1):
        yield from ((first, *rest) for rest in partitions(total - first, first))


@pytest.mark.parametrize("n", range(1, 9))
def test_majority_is_what_listing_the_draws_gives_whatever_ties(n):
    cases = [
        Votes(right, wrong, n - right - others)
        for right in range(n + 1)
        for others in range(n - right + 1)
        for wrong in partitions(others, others)
    ]
    for votes in cases:
        for k in range(1, n + 1):
            value, error = majority_at_k(votes, k)
            assert (value, error) == (pytest.approx(listed(votes, k), abs=1e-12), 0.0), (votes, k)


@pytest.mark.parametrize("votes", [Votes(7, (5, 4, 1), 3), Votes(5, (5, 5, 5)), Votes(1, (1,) * 9)])
def test_draws_agree_with_counting_and_state_their_error(votes, monkeypatch):
    k = 5
    exact = majority_at_k(votes, k).value
    monkeypatch.setattr(module, "MOST_COUNTED", 0)
    drawn = [majority_at_k(votes, k, seed=seed) for seed in range(30)]
    assert majority_at_k(votes, k, seed=3) == drawn[3]
    assert len({each.value for each in drawn}) > 10
    off = [(each.value - exact) / each.error for each in drawn]
    assert max(map(abs, off)) < 4
    assert 0.6 < math.sqrt(sum(each**2 for each in off) / len(off)) < 1.5
    assert drawn[0].error < 0.01


def test_the_vote_of_all_samples_needs_no_draws_however_many_there_are():
    assert majority_at_k(Votes(40, (40, 20), 10), 110) == (0.5, 0.0)
    assert majority_at_k(Votes(40, (41, 20)), 101) == (0.0, 0.0)
    assert majority_at_k(Votes(0, (), 50), 50) == (0.0, 0.0)
    assert majority_at_k(Votes(10, (20, 10)), 1) == (0.25, 0.0)  # nor does a vote of one
