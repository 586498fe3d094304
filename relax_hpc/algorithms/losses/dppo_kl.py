"""The importance-weighted policy gradient, stopped where a divergence is too large."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Loss, TokenLoss, Tokens
from relax_hpc.algorithms.ratios import advantages_of, binary_kl, log_ratio, shift
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor


class DppoKl(Loss):
    """loss_t = -r A; 0 where KL(anchor || pi) > eps and pi has moved in the direction of A.

    The divergence is of the token against all others; r = pi / anchor. Source: DPPO, binary KL
    (arXiv:2602.04879), anchor the sampler; eps .05 of verl's script. verl caps r at 20 without
    gradient, and drops a token without advantage, which costs nothing anyway.
    """

    name: Literal["dppo_kl"] = "dppo_kl"
    eps: Annotated[Number, Field(gt=0)] = 0.05
    """Largest divergence, nats."""

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        ratio, advantages = log_ratio(logprobs, tokens).exp(), advantages_of(tokens)
        forward, _ = binary_kl(logprobs, tokens)
        dropped = (forward > self.eps) & (shift(logprobs, tokens) * advantages > 0)
        loss = -ratio * advantages.where(~dropped, 0.0)
        return TokenLoss(loss, {"loss/masked_fraction": dropped})
