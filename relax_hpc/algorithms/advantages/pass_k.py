"""Advantages for pass@k: the chance that at least one of k responses is right."""

import math
from functools import cache
from typing import Literal

import numpy as np

from relax_hpc.algorithms.part import Advantage, Floats, Needs, Rows
from relax_hpc.sections import Number, Positive


class PassK(Advantage):
    """Mean advantage of a sibling over all teams of k; a team is worth 1 if one of it is right.

        rho = 1 - C(N - c, k) / C(N, k),  sigma = sqrt(rho (1 - rho)),  N siblings, c of them right
        A(right) = (1 - rho) / sigma
        A(wrong) = (1 - rho - C(N - c - 1, k - 1) / C(N - 1, k - 1)) / sigma

    0 if all teams are worth the same, and in groups of fewer than k. Source: Pass@k training
    (arXiv:2508.10751), whose code adds 1e-6 to sigma. verl's `grpo_passk` is from another paper
    (arXiv:2503.19595): it rewards the best of a group alone.
    """

    name: Literal["pass_k"] = "pass_k"
    k: Positive = 4
    """Responses per team; at most `rollout.samples_per_prompt`."""
    right: Number = 1.0
    """Least reward of a right answer."""

    def needs(self) -> Needs:
        return Needs(scope="group", min_siblings=max(self.k, 2))

    def of_groups(self, rows: Rows) -> Floats:
        worth = np.zeros_like(rows.rewards)
        for group, rewards in zip(worth, rows.rewards, strict=True):
            there, right = np.isfinite(rewards), rewards >= self.right
            values = _worth(int(there.sum()), int(right.sum()), self.k)
            group[there] = np.where(right[there], *values)
        return worth


@cache
def _worth(siblings: int, right: int, k: int) -> tuple[float, float]:
    """Advantages of right answers, and of wrong ones."""
    if siblings < k:
        return 0.0, 0.0
    none = math.comb(siblings - right, k) / math.comb(siblings, k)
    if none in (0, 1):
        return 0.0, 0.0
    others = math.comb(siblings - right - 1, k - 1) / math.comb(siblings - 1, k - 1)
    sigma = math.sqrt(none * (1 - none))
    return none / sigma, (none - others) / sigma
