"""The reward minus the mean of the other siblings."""

from typing import Literal

import numpy as np

from relax_hpc.algorithms.part import Advantage, Floats, Needs, Rows
from relax_hpc.algorithms.siblings import center, counts


class Rloo(Advantage):
    """A = R - mean(R of the others) = G / (G - 1) * (R - mean(R)).

    Unbiased, since the baseline does not depend on the response itself; a lone sibling has 0.
    Source: REINFORCE leave-one-out (arXiv:2402.14740); verl, TRL, OpenRLHF and SkyRL agree.
    """

    name: Literal["rloo"] = "rloo"

    def needs(self) -> Needs:
        return Needs(scope="group", min_siblings=2)

    def of_groups(self, rows: Rows) -> Floats:
        number = counts(rows.rewards)
        worth = center(rows.rewards) * number / np.maximum(number - 1, 1)
        return np.asarray(worth, rows.rewards.dtype)
