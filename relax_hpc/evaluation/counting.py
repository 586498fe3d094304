"""Figures of one prompt that take k of its n samples, without replacement, in every way."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from relax_hpc.errors import ConfigError

MOST_COUNTED = 32
"""Samples of a prompt up to which maj@k is counted; of more, draws are made."""
DRAWS = 4000
"""Draws of k samples where maj@k is not counted."""


class Votes(NamedTuple):
    """The final answers of n samples. All right ones are one answer, however they are written."""

    right: int
    """Samples that are right."""
    wrong: tuple[int, ...] = ()
    """Samples of each wrong answer, all positive."""
    silent: int = 0
    """Samples without an answer: they can be drawn, and do not vote."""

    @property
    def num_samples(self) -> int:
        return self.right + sum(self.wrong) + self.silent


class Majority(NamedTuple):
    """maj@k of one prompt."""

    value: float
    error: float
    """Standard error of the draws; 0 where it was counted."""


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Returns the probability that one or more of k samples are right: arXiv:2107.03374.

    1 - C(n - c, k) / C(n, k), as a product of ratios, so that no binomial coefficient overflows.
    With fewer samples than k, it cannot be estimated without bias.

    Raises:
        ConfigError: k is below 1 or above `num_samples`.
    """
    check_k(k, num_samples)
    return 1.0 - pass_all_k(num_samples, num_samples - num_right, k)


def pass_all_k(num_samples: int, num_right: int, k: int) -> float:
    """Returns pass^k, the probability that all of k samples are right: C(c, k) / C(n, k).

    Raises:
        ConfigError: k is below 1 or above `num_samples`.
    """
    check_k(k, num_samples)
    if k > num_right:
        return 0.0
    # C(c, k) / C(n, k) = C(n - k, n - c) / C(n, n - c): the shorter of both products.
    few, many = sorted((k, num_samples - num_right))
    return math.prod((num_samples - many - i) / (num_samples - i) for i in range(few))


def majority_at_k(votes: Votes, k: int, *, seed: int = 0) -> Majority:
    """Returns the probability that the answer most frequent among k samples is the right one.

    Answers that tie have equal chances. Where no sample that is drawn has an answer, it is wrong.

    Args:
        seed: of the draws, which are made of more than `MOST_COUNTED` samples.

    Raises:
        ConfigError: k is below 1 or above the number of samples.
    """
    check_k(k, votes.num_samples)
    votes = Votes(votes.right, tuple(sorted(votes.wrong)), votes.silent)
    if k == votes.num_samples:
        return Majority(_whole(votes), 0.0)
    if votes.num_samples <= MOST_COUNTED or k == 1:
        return Majority(_counted(votes, k), 0.0)
    return _drawn(votes, k, seed)


def check_k(k: int, num_samples: int) -> None:
    """Refuses what cannot be drawn.

    Raises:
        ConfigError: k is below 1 or above `num_samples`.
    """
    if not 1 <= k <= num_samples:
        raise ConfigError(
            f"k = {k}: there are {num_samples} samples of a prompt; "
            f"use k from 1 to {num_samples}, or set samples_per_prompt of the set"
        )


def _whole(votes: Votes) -> float:
    """Returns the share of the right answer in the vote of all samples."""
    top = max(votes.wrong, default=0)
    if votes.right == 0 or votes.right < top:
        return 0.0
    return 1.0 if votes.right > top else 1 / (1 + votes.wrong.count(top))


@lru_cache(maxsize=4096)
def _counted(votes: Votes, k: int) -> float:
    """Counts the draws, by how many of them are right, that the right answer wins or ties in."""
    won = 0.0
    for top in range(1, min(k, votes.right) + 1):
        ways = _ways(votes, k - top, top)
        shared = sum(count / (1 + tied) for tied, count in enumerate(ways))
        won += math.comb(votes.right, top) * shared
    return won / math.comb(votes.num_samples, k)


def _ways(votes: Votes, size: int, top: int) -> list[int]:
    """Counts the draws of `size` samples that are not right, none of an answer above `top` times.

    Returns:
        Their numbers, by how many answers come `top` times: from 0 to size // top.
    """
    most_tied = size // top
    ways = [[0] * (most_tied + 1) for _ in range(size + 1)]  # [samples drawn, answers that tie]
    for drawn in range(min(size, votes.silent) + 1):
        ways[drawn][0] = math.comb(votes.silent, drawn)
    for count in votes.wrong:
        more = [[0] * (most_tied + 1) for _ in range(size + 1)]
        for taken in range(min(count, top, size) + 1):
            ties, choices = int(taken == top), math.comb(count, taken)
            for drawn in range(size - taken + 1):
                for tied in range(most_tied + 1 - ties):
                    more[drawn + taken][tied + ties] += choices * ways[drawn][tied]
        ways = more
    return ways[size]


def _drawn(votes: Votes, k: int, seed: int) -> Majority:
    random = np.random.default_rng(seed)
    colors: Sequence[int] = (votes.right, *votes.wrong, votes.silent)
    drawn = random.multivariate_hypergeometric(colors, k, size=DRAWS, method="marginals")
    right, wrong = drawn[:, :1], drawn[:, 1:-1]
    wins = (right[:, 0] > 0) & (right >= wrong).all(axis=1)
    credit = wins / (1 + (wrong == right).sum(axis=1))
    return Majority(float(credit.mean()), float(credit.std(ddof=1)) / math.sqrt(DRAWS))
