"""The reward minus its group's mean."""

from typing import Literal

from relax_hpc.algorithms.part import Advantage, Floats, Needs, Rows
from relax_hpc.algorithms.siblings import center


class GroupMean(Advantage):
    """A = R - mean(R) over the siblings of a prompt.

    A group of equals is worth 0. Source: Dr. GRPO (arXiv:2503.20783), which leaves out GRPO's
    division by the deviation: it favours prompts that are almost always, or almost never, solved.
    """

    name: Literal["group_mean"] = "group_mean"

    def needs(self) -> Needs:
        return Needs(scope="group", min_siblings=2)

    def of_groups(self, rows: Rows) -> Floats:
        return center(rows.rewards).astype(rows.rewards.dtype)
