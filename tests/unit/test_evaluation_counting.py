"""pass@k, pass^k and maj@k of a prompt equal what listing every draw gives."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.evaluation import counting
from relax_hpc.evaluation.counting import Votes, majority_at_k, pass_all_k, pass_at_k


@pytest.mark.parametrize("n", range(1, 13))
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


def test_numbers_worked_by_hand():
    """Of four samples two are right: of six pairs one is all wrong, one all right."""
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert pass_all_k(4, 2, 2) == pytest.approx(1 / 6)
    assert pass_at_k(4, 2, 3) == 1.0 and pass_all_k(4, 2, 3) == 0.0
    assert majority_at_k(Votes(2, (1, 1)), 2) == (pytest.approx((1 + 4 / 2) / 6), 0.0)


def test_many_samples_do_not_overflow():
    exact = 1 - Fraction(math.comb(99_990, 5_000), math.comb(100_000, 5_000))
    assert pass_at_k(100_000, 10, 5_000) == pytest.approx(float(exact), rel=1e-12)
    assert pass_at_k(100_000, 99_999, 1) == pytest.approx(0.99999)
    assert pass_all_k(100_000, 99_990, 50_000) == pytest.approx(2**-10, rel=1e-3)


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
    assert any(len(set(votes.wrong)) < len(votes.wrong) for votes in cases) or n < 2
    for votes in cases:
        for k in range(1, n + 1):
            value, error = majority_at_k(votes, k)
            assert (value, error) == (pytest.approx(listed(votes, k), abs=1e-12), 0.0), (votes, k)


@pytest.mark.parametrize("votes", [Votes(7, (5, 4, 1), 3), Votes(5, (5, 5, 5)), Votes(1, (1,) * 9)])
def test_draws_agree_with_counting_and_state_their_error(votes, monkeypatch):
    k = 5
    exact = majority_at_k(votes, k).value
    monkeypatch.setattr(counting, "MOST_COUNTED", 0)
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


@pytest.mark.parametrize("k", [9, 0, -1])
def test_more_samples_than_there_are_cannot_be_drawn(k):
    for figure in (pass_at_k, pass_all_k):
        with pytest.raises(ConfigError, match=f"k = {k}: there are 8 samples .* k from 1 to 8"):
            figure(8, 3, k)
    with pytest.raises(ConfigError, match=f"k = {k}: there are 8 samples"):
        majority_at_k(Votes(3, (5,)), k)
