"""The importance-weighted policy gradient within a band of binary divergences."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Loss, TokenLoss, Tokens
from relax_hpc.algorithms.ratios import advantages_of, binary_kl, log_ratio
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor


class Kpop(Loss):
    """loss_t = -r A [KL(anchor || pi) <= phi and KL(pi || anchor) <= phi] + drift * (log r)^2.

    Both divergences are of the token against all others: the band is wide in ratio for rare tokens
    and narrow for sure ones. r = pi / anchor. Source: KPop (Guo et al., Ant, 2026), phi = 0.1;
    prime-rl's proposal has this form, with the drift of ipo. AReaL and verl mask by it, too, AReaL
    with <, and between the policy before the step and the sampler.
    """

    name: Literal["kpop"] = "kpop"
    phi: Annotated[Number, Field(gt=0)] = 0.1
    """Largest divergence, nats, in either direction."""
    drift: Annotated[Number, Field(ge=0)] = 1e-3
    """Weight of the squared log ratio."""

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        logs = log_ratio(logprobs, tokens)
        forward, backward = binary_kl(logprobs, tokens)
        dropped = forward.maximum(backward) > self.phi
        worth = advantages_of(tokens).where(~dropped, 0.0)
        loss = -logs.exp() * worth + self.drift * logs.square()
        return TokenLoss(loss, {"loss/masked_fraction": dropped})
