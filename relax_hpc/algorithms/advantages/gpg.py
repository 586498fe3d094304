"""Group policy gradient: the reward minus its group's mean."""

from typing import Literal

from relax_hpc.algorithms.part import Advantage, Floats, Needs, Rows
from relax_hpc.algorithms.siblings import center


class Gpg(Advantage):
    """A = R - mean(R) over the siblings of a prompt.

    The paper multiplies by B / (B - M), M of the B responses being in groups of equals, since its
    mean runs over all: here, without KL or entropy, such groups are not trained on and count in no
    mean, which is that factor. Source: GPG (arXiv:2504.02546), as in the authors' code, which
    divides the loss by the share of groups with spread. verl counts scores other than 0 instead, so
    right answers to easy prompts raise it.
    """

    name: Literal["gpg"] = "gpg"

    def needs(self) -> Needs:
        return Needs(scope="group", min_siblings=2)

    def of_groups(self, rows: Rows) -> Floats:
        return center(rows.rewards).astype(rows.rewards.dtype)
