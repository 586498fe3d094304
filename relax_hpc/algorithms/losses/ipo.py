"""The importance-weighted policy gradient within a band of probabilities."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Loss, TokenLoss, Tokens
from relax_hpc.algorithms.ratios import advantages_of, log_ratio, shift
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor


class Ipo(Loss):
    """loss_t = -r A [abs(pi - anchor) <= eps] + drift * (log r)^2, r = pi / anchor.

    A token whose probability has moved further than eps, in whichever direction, has no policy
    gradient; the drift term pulls all trained tokens back to the anchor. Nothing is clipped.
    Source: prime-rl's default since August 2026 (`ipo`); the band is DPPO's (arXiv:2602.04879)
    without a regard for the sign of A, the drift Kimi K2.5's (arXiv:2602.02276). Rows without
    advantage are not read for the drift alone, as in prime-rl, which filters them out.
    """

    name: Literal["ipo"] = "ipo"
    eps: Annotated[Number, Field(gt=0, le=1)] = 0.1
    """Largest change of a token's probability that has a policy gradient."""
    drift: Annotated[Number, Field(ge=0)] = 1e-3
    """Weight of the squared log ratio."""

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        logs = log_ratio(logprobs, tokens)
        dropped = shift(logprobs, tokens).abs() > self.eps
        worth = advantages_of(tokens).where(~dropped, 0.0)
        loss = -logs.exp() * worth + self.drift * logs.square()
        return TokenLoss(loss, {"loss/masked_fraction": dropped})
