"""REINFORCE++ with the mean of the prompt group as its baseline."""

from collections.abc import Sequence
from typing import Literal

from relax_hpc.algorithms.advantages.reinforce_pp import whiten
from relax_hpc.algorithms.part import Advantage, Floats, Needs, Rows, Tokens, Total
from relax_hpc.algorithms.siblings import center


class ReinforcePpBaseline(Advantage):
    """A_t = (R - mean(R) of the group), whitened over all trained tokens of the batch.

    Groups of equal rewards count in mean and deviation, and are trained on. The preset adds KL in
    the loss, k2. Source: REINFORCE++ (arXiv:2501.03262), `w/ baseline`; verl agrees. slime
    subtracts from each token its own KL alone, not that of later tokens.
    """

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"

    def needs(self) -> Needs:
        return Needs(scope="batch", prepass=True, min_siblings=2, every_row=True)

    def of_groups(self, rows: Rows) -> Floats:
        return center(rows.rewards).astype(rows.rewards.dtype)

    def prepare(self, batches: Sequence[Tokens], total: Total) -> list[Tokens]:
        return whiten(batches, total)
