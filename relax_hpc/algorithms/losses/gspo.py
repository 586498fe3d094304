"""The clipped surrogate of PPO, by sequence."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Loss, TokenLoss, Tokens
from relax_hpc.algorithms.ratios import advantages_of, log_ratio, sequence_ratio
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor


class Gspo(Loss):
    """loss_t = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean of log(pi /
    anchor)).

    The mean is over the trained tokens of the sequence, and every sequence weighs alike with the
    aggregation that goes with it. Each token has the gradient of its own logprob, so that tokens
    may be worth different amounts (a critic, a teacher, KL in the reward), or be left out.
    Source: GSPO (arXiv:2507.18071), GSPO-token; as verl. slime's gradient goes through the mean to
    all tokens: the same where they are worth the same. Bounds this narrow saturate under lag.
    """

    name: Literal["gspo"] = "gspo"
    clip_low: Annotated[Number, Field(gt=0, lt=1)] = 3e-4
    """Lower clip: sequence ratio >= 1 - clip_low."""
    clip_high: Annotated[Number, Field(gt=0)] = 4e-4
    """Upper clip: sequence ratio <= 1 + clip_high."""

    @property
    def ratio_of(self) -> Literal["token", "sequence"]:
        return "sequence"

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        ratio = sequence_ratio(log_ratio(logprobs, tokens), tokens)
        advantages = advantages_of(tokens)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        is_clipped = clipped.detach() < (ratio * advantages).detach()
        return TokenLoss(-(ratio * advantages).minimum(clipped), {"loss/clip_fraction": is_clipped})
