"""The clipped surrogate of PPO, by token."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Loss, TokenLoss, Tokens
from relax_hpc.algorithms.ratios import advantages_of, log_ratio
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor


class PpoClip(Loss):
    """loss_t = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / anchor.

    The anchor is the sampler unless a job sets `anchor = "old"`: the policy before the step, as in
    PPO, DAPO, verl and slime. With one update per batch that ratio is 1, and nothing clips. With
    `dual`, and A < 0, the loss is at most -dual * A: larger ratios have no gradient
    (arXiv:1912.09729). Sources: PPO (arXiv:1707.06347); different bounds are DAPO's clip-higher
    (arXiv:2503.14476). verl has dual = 3 by default; slime's callers leave it off.
    """

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Annotated[Number, Field(gt=0, lt=1)] = 0.2
    """Lower clip: ratio >= 1 - clip_low."""
    clip_high: Annotated[Number, Field(gt=0)] = 0.28
    """Upper clip: ratio <= 1 + clip_high."""
    dual: Annotated[Number, Field(gt=1)] | None = None
    """Largest ratio that still counts where the advantage is below 0; 3 is usual."""

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        ratio, advantages = log_ratio(logprobs, tokens).exp(), advantages_of(tokens)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        loss = -(ratio * advantages).minimum(clipped)
        is_clipped = clipped.detach() < (ratio * advantages).detach()
        if self.dual is not None:
            limit = -self.dual * advantages
            beyond = (advantages < 0) & (loss.detach() > limit)
            loss, is_clipped = limit.where(beyond, loss), is_clipped | beyond
        return TokenLoss(loss, {"loss/clip_fraction": is_clipped})
