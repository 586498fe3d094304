"""A soft gate around a ratio of 1."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Loss, TokenLoss, Tokens
from relax_hpc.algorithms.ratios import advantages_of, log_ratio
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor

Temperature = Annotated[Number, Field(gt=0)]


class Sapo(Loss):
    """loss_t = -(4 / tau) sigmoid(tau (r - 1)) A, r = pi / anchor, tau by the sign of A.

    At r = 1 the gradient is that of the policy gradient; on both sides it fades, faster for a
    larger tau. Source: SAPO (arXiv:2511.20347); verl, TRL and AReaL agree, but verl always averages
    by sequence, as the paper does, and AReaL by token.
    """

    name: Literal["sapo"] = "sapo"
    tau_positive: Temperature = 1.0
    """Steepness of the gate where the advantage is above 0."""
    tau_negative: Temperature = 1.05
    """Steepness elsewhere."""

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        ratio, advantages = log_ratio(logprobs, tokens).exp(), advantages_of(tokens)
        above, below = (
            (4 / tau) * (tau * (ratio - 1)).sigmoid()
            for tau in (self.tau_positive, self.tau_negative)
        )
        return TokenLoss(-advantages * above.where(advantages > 0, below))
