"""The clipped surrogate of PPO, by token."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Loss, TokenLoss, Tokens
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor


class PpoClip(Loss):
    """loss_t = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / anchor.

    Sources: PPO (arXiv:1707.06347); bounds that differ are clip-higher of DAPO (arXiv:2503.14476).
    """

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Annotated[Number, Field(gt=0, lt=1)] = 0.2
    """Lower clip: ratio >= 1 - clip_low."""
    clip_high: Annotated[Number, Field(gt=0)] = 0.28
    """Upper clip: ratio <= 1 + clip_high."""

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        mask, columns = tokens.loss_mask, tokens.columns
        log_ratio = (logprobs - columns["anchor_logprobs"]).where(mask, 0.0)
        ratio, advantages = log_ratio.exp(), columns["advantages"].where(mask, 0.0)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -(ratio * advantages).minimum(clipped * advantages)
        metrics = {
            "loss/clip_fraction": clipped != ratio,
            "loss/approx_kl": (ratio - 1 - log_ratio).detach(),
        }
        return TokenLoss(loss, metrics)
