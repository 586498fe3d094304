"""Computes figures of an evaluation with standard errors: pass@k, pass^k, maj@k.

A prompt's samples are drawn without replacement, counting all ways. Errors are clustered by prompt,
since samples of one prompt are correlated: more samples of few prompts do not make them small.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from relax_hpc.errors import ConfigError

MOST_COUNTED = 32
"""Most samples per prompt for counting maj@k exactly; beyond, draws are made."""
DRAWS = 4000
"""Draws of k samples for maj@k."""


class Votes(NamedTuple):
    """The final answers of n samples. All right ones count as one answer."""

    right: int
    wrong: tuple[int, ...] = ()
    """Samples of each wrong answer, all positive."""
    silent: int = 0
    """Samples without an answer: they can be drawn, but do not vote."""

    @property
    def num_samples(self) -> int:
        return self.right + sum(self.wrong) + self.silent


class Majority(NamedTuple):
    """maj@k of one prompt."""

    value: float
    error: float
    """Standard error of the draws; 0 if exact."""


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Returns the probability that one or more of k samples are right: arXiv:2107.03374.

    1 - C(n - c, k) / C(n, k), as a product of ratios, so that no binomial coefficient overflows.
    There is no unbiased estimate with fewer samples than k.

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
    """Returns the probability that the most frequent answer among k samples is right.

    Tied answers have equal chances. Draws without any answer are wrong.

    Args:
        seed: of the draws, for more than `MOST_COUNTED` samples.

    Raises:
        ConfigError: k is below 1 or above the number of samples.
    """
    check_k(k, votes.num_samples)
    votes = Votes(votes.right, tuple(sorted(votes.wrong)), votes.silent)
    if k == votes.num_samples:
        return Majority(_whole(votes), 0.0)
    if votes.num_samples <= MOST_COUNTED or k == 1:
        return Majority(_count_draws(votes, k), 0.0)
    return _drawn(votes, k, seed)


def check_k(k: int, num_samples: int) -> None:
    """Raises:
    ConfigError: k is below 1 or above `num_samples`.
    """
    if not 1 <= k <= num_samples:
        raise ConfigError(
            f"k = {k}: there are {num_samples} samples of a prompt; "
            f"use k from 1 to {num_samples}, or set samples_per_prompt of the set"
        )


def _whole(votes: Votes) -> float:
    top = max(votes.wrong, default=0)
    if votes.right == 0 or votes.right < top:
        return 0.0
    return 1.0 if votes.right > top else 1 / (1 + votes.wrong.count(top))


@lru_cache(maxsize=4096)
def _count_draws(votes: Votes, k: int) -> float:
    """Counts the draws, by their number of right samples, in which the right answer wins or
    ties."""
    won = 0.0
    for top in range(1, min(k, votes.right) + 1):
        ways = _ways(votes, k - top, top)
        shared = sum(count / (1 + tied) for tied, count in enumerate(ways))
        won += math.comb(votes.right, top) * shared
    return won / math.comb(votes.num_samples, k)


def _ways(votes: Votes, size: int, top: int) -> list[int]:
    """Counts the draws of `size` wrong samples with no answer more than `top` times.

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


_ROUNDING = 1e-9


class ScoredResponse(NamedTuple):
    """A response to a prompt, for the figures."""

    prompt: int
    score: float
    is_truncated: bool
    answer: str | None = None
    """Final answer; None if there is none, or it cannot be extracted."""
    source: str = ""
    """The prompt's subset."""


class Figure(NamedTuple):
    """A mean over prompts."""

    value: float
    error: float | None
    """Standard error; None for a single prompt."""


class Statistics(NamedTuple):
    num_prompts: int
    num_samples: int
    mean: Figure
    truncated: Figure
    """Fraction of the samples that were cut off."""
    pass_at: dict[int, Figure]
    """pass@k by k: one or more of k samples are right."""
    pass_all: dict[int, Figure]
    """pass^k by k: all of k samples are right."""
    majority_at: dict[int, Figure]
    """maj@k by k: the most frequent answer of k samples is right. Empty if no wrong sample has an
    extractable answer, or fewer than half of the right ones have."""
    majority_draws: dict[int, float]
    """Standard error of maj@k from draws, by k; 0 if exact."""


def statistics(
    samples: Iterable[ScoredResponse], ks: Sequence[int], *, right: float = 1.0
) -> Statistics:
    """Computes the figures of samples.

    Args:
        ks: of pass@k, pass^k and maj@k.
        right: score from which on a sample is right.

    Raises:
        ConfigError: there are no samples, or a k exceeds the samples of a prompt, which is named.
    """
    prompts = by_prompt(samples)
    if not prompts:
        raise ConfigError("statistics need a sample; none are given")
    _check(prompts, ks)
    votes = [_votes(each, right) for each in prompts.values()]
    counts = [(vote.num_samples, vote.right) for vote in votes]
    is_told = _are_told(prompts.values(), right)
    majority = {
        k: [majority_at_k(vote, k, seed=seed) for seed, vote in enumerate(votes)]
        for k in (ks if is_told else ())
    }
    return Statistics(
        num_prompts=len(prompts),
        num_samples=sum(n for n, _ in counts),
        mean=estimate_clustered([[sample.score for sample in each] for each in prompts.values()]),
        truncated=estimate_clustered(
            [[sample.is_truncated for sample in p] for p in prompts.values()]
        ),
        pass_at={k: estimate_clustered([[pass_at_k(n, c, k)] for n, c in counts]) for k in ks},
        pass_all={k: estimate_clustered([[pass_all_k(n, c, k)] for n, c in counts]) for k in ks},
        majority_at={
            k: estimate_clustered([[m.value] for m in each]) for k, each in majority.items()
        },
        majority_draws={
            k: math.hypot(*(m.error for m in each)) / len(each) for k, each in majority.items()
        },
    )


def by_prompt(samples: Iterable[ScoredResponse]) -> dict[int, list[ScoredResponse]]:
    """Groups samples by prompt, in the order of their numbers."""
    found = defaultdict[int, list[ScoredResponse]](list)
    for sample in samples:
        found[sample.prompt].append(sample)
    return dict(sorted(found.items()))


def by_source(samples: Iterable[ScoredResponse]) -> dict[str, list[ScoredResponse]]:
    """Groups samples by subset, in the order of the names."""
    found = defaultdict[str, list[ScoredResponse]](list)
    for sample in samples:
        found[sample.source].append(sample)
    return dict(sorted(found.items()))


def estimate_clustered(clusters: Sequence[Sequence[float]]) -> Figure:
    """Returns the mean of all values, and its standard error for independently drawn clusters.

    With R_p the sum of the residuals of cluster p, of P clusters and N values, the squared error is
    P / (P - 1) sum R_p^2 / N^2; for clusters of one size it is that of their means.
    """
    sizes, sums = list(map(len, clusters)), list(map(math.fsum, clusters))
    count, total = len(clusters), sum(sizes)
    mean = math.fsum(sums) / total
    if count == 1:
        return Figure(mean, None)
    squares = math.fsum((s - n * mean) ** 2 for s, n in zip(sums, sizes, strict=True))
    return Figure(mean, math.sqrt(count / (count - 1) * squares) / total)


def _check(prompts: dict[int, list[ScoredResponse]], ks: Sequence[int]) -> None:
    prompt, fewest = min(prompts.items(), key=lambda item: len(item[1]))
    for k in ks:
        try:
            check_k(k, len(fewest))
        except ConfigError as error:
            raise ConfigError(f"prompt {prompt}: {error}") from None


def _are_told(prompts: Iterable[Sequence[ScoredResponse]], right: float) -> bool:
    """Whether answers can be extracted, so that votes for wrong ones are visible: if right samples
    have none, a wrong answer here and there is chance."""
    samples = [sample for each in prompts for sample in each]
    good = [sample.answer is not None for sample in samples if _is_right(sample, right)]
    are_wrong_told = any(s.answer is not None for s in samples if not _is_right(s, right))
    return len(good) == len(samples) or (are_wrong_told and 2 * sum(good) >= len(good))


def _is_right(sample: ScoredResponse, right: float) -> bool:
    return sample.score >= right - _ROUNDING


def _votes(samples: Sequence[ScoredResponse], right: float) -> Votes:
    wrong = [sample.answer for sample in samples if not _is_right(sample, right)]
    named = Counter(answer for answer in wrong if answer is not None)
    return Votes(len(samples) - len(wrong), tuple(named.values()), wrong.count(None))
