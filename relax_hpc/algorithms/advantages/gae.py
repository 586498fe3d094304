"""Advantages per token from a critic's values."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from relax_hpc.algorithms.part import Advantage, Floats, Needs, Rows, Tokens, Total
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor


class Gae(Advantage):
    """A_t = delta_t + gamma lam A_t', see `estimates.estimate_gae`; needs a [critic].

    Sources: arXiv:1506.02438; lam by length, VAPO (arXiv:2504.05118). Peers whiten by default.
    """

    name: Literal["gae"] = "gae"
    gamma: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Discount from a trained token to the next one."""
    lam: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """1 uses rewards alone (no bias), 0 the next states' values (little variance)."""
    length_alpha: Annotated[Number, Field(ge=0)] = 0.0
    """Above 0, lam is 1 - 1 / (length_alpha l) in a response of l trained tokens, at least 0; VAPO
    uses 0.05."""
    whiten: bool = False
    """Normalise the advantages of a batch to mean 0 and deviation 1. Waits for the batch."""

    @model_validator(mode="after")
    def _lam_is_said_once(self) -> Self:
        if self.length_alpha and self.lam != 1:
            said = f"lam = {self.lam:g}: with length_alpha = {self.length_alpha:g}"
            raise ValueError(f"{said} the length of a response decides; remove one of them")
        return self

    def needs(self) -> Needs:
        values = {"ragged/values": f"algorithm.advantage.name = {self.name!r}"}
        scope: Literal["row", "batch"] = "batch" if self.whiten else "row"
        return Needs(values, scope, prepass=self.whiten, every_row=True)

    def of_groups(self, rows: Rows) -> Floats:
        """The rewards to come, from every token on."""
        return rows.rewards

    def of_tokens(self, tokens: Tokens) -> "Tensor":
        from relax_hpc.algorithms.estimates import estimate_gae

        columns = tokens.columns
        return estimate_gae(
            columns["values"], columns["advantages"], tokens,
            gamma=self.gamma, lam=self.lam, alpha=self.length_alpha,
        ).float()  # fmt: skip

    def prepare(self, batches: Sequence[Tokens], total: Total) -> list[Tokens]:
        from relax_hpc.algorithms.advantages.reinforce_pp import whiten

        return whiten(batches, total)
