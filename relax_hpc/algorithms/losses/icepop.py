"""The importance-weighted policy gradient within a band of ratios."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Loss, TokenLoss, Tokens
from relax_hpc.algorithms.ratios import advantages_of, log_ratio
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor


class Icepop(Loss):
    """loss_t = -r A if low <= r <= high, else 0; r = pi / anchor.

    Source: IcePop of Ring-1T (arXiv:2510.18855), .5 to 5. There, and in slime and AReaL, the band
    weighs another loss by the policy before the step over the sampler, which is the correction
    `icepop`; as a loss of its own it is prime-rl's, .2 to 5.
    """

    name: Literal["icepop"] = "icepop"
    low: Annotated[Number, Field(ge=0, lt=1)] = 0.5
    """Least ratio that teaches."""
    high: Annotated[Number, Field(gt=1)] = 5.0
    """Largest ratio that teaches."""

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        ratio = log_ratio(logprobs, tokens).exp()
        dropped = (ratio < self.low) | (ratio > self.high)
        worth = advantages_of(tokens).where(~dropped, 0.0)
        return TokenLoss(-ratio * worth, {"loss/masked_fraction": dropped})
