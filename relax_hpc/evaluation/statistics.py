"""Figures of an evaluation, each with its standard error over prompts.

Samples of one prompt are alike, so prompts are the units: errors are clustered by prompt, and
more samples of few prompts do not make them small.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from relax_hpc.errors import ConfigError
from relax_hpc.evaluation.counting import Votes, check_k, majority_at_k, pass_all_k, pass_at_k

_ROUNDING = 1e-9


class Sample(NamedTuple):
    """A response to a prompt, as far as it counts."""

    prompt: int
    score: float
    is_truncated: bool
    answer: str | None = None
    """Final answer; None where there is none, or none can be told."""
    source: str = ""
    """Subset of the set that the prompt is from."""


class Figure(NamedTuple):
    """A mean over prompts."""

    value: float
    error: float | None
    """Standard error; None of a single prompt."""


class Statistics(NamedTuple):
    """Figures of samples of several prompts."""

    num_prompts: int
    num_samples: int
    mean: Figure
    """Score of a sample."""
    truncated: Figure
    """Part of the samples that were cut off."""
    pass_at: dict[int, Figure]
    """pass@k by k: one or more of k samples are right."""
    pass_all: dict[int, Figure]
    """pass^k by k: all of k samples are right."""
    majority_at: dict[int, Figure]
    """maj@k by k: the most frequent answer of k samples is right. Empty where no wrong sample has
    an answer to be told, or fewer than half of the right ones have."""
    majority_draws: dict[int, float]
    """Part of the error of maj@k that draws make, by k; 0 where it was counted."""


def statistics(samples: Iterable[Sample], ks: Sequence[int], *, right: float = 1.0) -> Statistics:
    """Sums up samples.

    Args:
        ks: of pass@k, pass^k and maj@k.
        right: score from which on a sample is right.

    Raises:
        ConfigError: there are no samples, or a k is above the samples of a prompt, which is named.
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
        mean=clustered([[sample.score for sample in each] for each in prompts.values()]),
        truncated=clustered([[sample.is_truncated for sample in p] for p in prompts.values()]),
        pass_at={k: clustered([[pass_at_k(n, c, k)] for n, c in counts]) for k in ks},
        pass_all={k: clustered([[pass_all_k(n, c, k)] for n, c in counts]) for k in ks},
        majority_at={k: clustered([[m.value] for m in each]) for k, each in majority.items()},
        majority_draws={
            k: math.hypot(*(m.error for m in each)) / len(each) for k, each in majority.items()
        },
    )


def by_prompt(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    """Divides samples by prompt, in the order of their numbers."""
    found = defaultdict[int, list[Sample]](list)
    for sample in samples:
        found[sample.prompt].append(sample)
    return dict(sorted(found.items()))


def by_source(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Divides samples by subset, in the order of the names."""
    found = defaultdict[str, list[Sample]](list)
    for sample in samples:
        found[sample.source].append(sample)
    return dict(sorted(found.items()))


def clustered(clusters: Sequence[Sequence[float]]) -> Figure:
    """Returns the mean of all values, and its standard error if clusters are drawn independently.

    With R_p the sum of the residuals of cluster p, of P clusters and N values, the squared error
    is P / (P - 1) sum R_p^2 / N^2, which for clusters of one size is that of their means.
    Correlation within a cluster makes it larger than that of N independent values.
    """
    sizes, sums = list(map(len, clusters)), list(map(math.fsum, clusters))
    count, total = len(clusters), sum(sizes)
    mean = math.fsum(sums) / total
    if count == 1:
        return Figure(mean, None)
    squares = math.fsum((s - n * mean) ** 2 for s, n in zip(sums, sizes, strict=True))
    return Figure(mean, math.sqrt(count / (count - 1) * squares) / total)


def _check(prompts: dict[int, list[Sample]], ks: Sequence[int]) -> None:
    prompt, fewest = min(prompts.items(), key=lambda item: len(item[1]))
    for k in ks:
        try:
            check_k(k, len(fewest))
        except ConfigError as error:
            raise ConfigError(f"prompt {prompt}: {error}") from None


def _are_told(prompts: Iterable[Sequence[Sample]], right: float) -> bool:
    """Whether answers can be told, so that votes for a wrong one are seen: where what is right has
    none either, a wrong answer here and there is chance."""
    samples = [sample for each in prompts for sample in each]
    good = [sample.answer is not None for sample in samples if _is_right(sample, right)]
    are_wrong_told = any(s.answer is not None for s in samples if not _is_right(s, right))
    return len(good) == len(samples) or (are_wrong_told and 2 * sum(good) >= len(good))


def _is_right(sample: Sample, right: float) -> bool:
    return sample.score >= right - _ROUNDING


def _votes(samples: Sequence[Sample], right: float) -> Votes:
    wrong = [sample.answer for sample in samples if not _is_right(sample, right)]
    named = Counter(answer for answer in wrong if answer is not None)
    return Votes(len(samples) - len(wrong), tuple(named.values()), wrong.count(None))
