"""The reward minus its group's mean, divided by the batch's deviation."""

from typing import Literal

import numpy as np

from relax_hpc.algorithms.part import Advantage, Floats, Needs, Rows
from relax_hpc.algorithms.siblings import center

_EPS = 1e-6
"""Keeps a batch of nearly equal rewards finite."""


class BatchStd(Advantage):
    """A = (R - mean(R) of the group) / (std(R) of the batch + 1e-6); std divides by B - 1.

    Needs the whole batch. Source: Lite PPO (arXiv:2508.08221). The deviation is of rewards, as in
    TRL (`scale_rewards = "batch"`, + 1e-4), not of the centred ones.
    """

    name: Literal["batch_std"] = "batch_std"

    def needs(self) -> Needs:
        return Needs(scope="batch", min_siblings=2)

    def of_groups(self, rows: Rows) -> Floats:
        exact = rows.rewards[np.isfinite(rows.rewards)].astype(np.float64)
        scale = exact.std(ddof=1) if exact.size > 1 else 0.0
        return (center(rows.rewards) / (scale + _EPS)).astype(rows.rewards.dtype)
