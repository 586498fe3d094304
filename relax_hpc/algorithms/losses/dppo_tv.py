"""The importance-weighted policy gradient, stopped where a probability has moved too far."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Loss, TokenLoss, Tokens
from relax_hpc.algorithms.ratios import advantages_of, log_ratio, shift
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor


class DppoTv(Loss):
    """loss_t = -r A; 0 where A > 0 and pi - anchor > eps, or A < 0 and pi - anchor < -eps.

    r = pi / anchor. Only steps that go on in the direction of A are stopped, as in PPO, but by the
    difference of probabilities: a rare token may gain a large ratio. Source: DPPO, binary total
    variation (arXiv:2602.04879), anchor the sampler; eps .15 of verl's script, .2 in prime-rl. verl
    caps r at 20 without gradient, SkyRL at e**20 as here.
    """

    name: Literal["dppo_tv"] = "dppo_tv"
    eps: Annotated[Number, Field(gt=0, le=1)] = 0.15
    """Largest change of a token's probability in its advantage's direction."""

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        ratio, advantages = log_ratio(logprobs, tokens).exp(), advantages_of(tokens)
        dropped = shift(logprobs, tokens) * advantages.sign() > self.eps
        loss = -ratio * advantages.where(~dropped, 0.0)
        return TokenLoss(loss, {"loss/masked_fraction": dropped})
