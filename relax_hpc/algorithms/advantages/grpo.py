"""The reward minus its group's mean, divided by the group's deviation."""

from typing import Literal

import numpy as np

from relax_hpc.algorithms.part import Advantage, Floats, Needs, Rows
from relax_hpc.algorithms.siblings import center, counts, deviation

_EPS = 1e-6
"""Keeps a group of nearly equal rewards finite."""


class Grpo(Advantage):
    """A = (R - mean(R)) / (std(R) + 1e-6) over the siblings of a prompt; std divides by G - 1.

    A group of equals, or with a single reward, is worth 0 (verl and SkyRL give a single one A = R).
    Source: GRPO (arXiv:2402.03300), outcome supervision. TRL adds 1e-4 to the deviation. The preset
    of this name has the loss `ppo_clip` with the ratio to the sampler; in the paper, verl and slime
    it is to the policy before the step.
    """

    name: Literal["grpo"] = "grpo"

    def needs(self) -> Needs:
        return Needs(scope="group", min_siblings=2)

    def of_groups(self, rows: Rows) -> Floats:
        centres = center(rows.rewards)
        scale = deviation(centres, counts(rows.rewards)) + _EPS
        return np.asarray(centres / scale, rows.rewards.dtype)
