"""No advantage: rewards are only measured."""

from typing import Literal

import numpy as np

from relax_hpc.algorithms.part import Advantage, Floats, Needs, Rows


class NoAdvantage(Advantage):
    """A = 0: only a teacher teaches, see `distill.Distill`.

    On-policy distillation (GKD, arXiv:2306.13649) needs no rewards; open-instruct has a switch for
    it (`opd_pure`).
    """

    name: Literal["none"] = "none"

    def needs(self) -> Needs:
        return Needs(every_row=True)

    def of_groups(self, rows: Rows) -> Floats:
        return np.zeros_like(rows.rewards)
