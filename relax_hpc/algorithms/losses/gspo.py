"""The clipped surrogate of PPO, by sequence."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Loss, TokenLoss, Tokens
from relax_hpc.algorithms.ratios import advantages_of, log_ratio, sequence_means
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor


class Gspo(Loss):
    """loss_t = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean of log(pi /
    anchor)).

    The mean is over the trained tokens of the sequence: each of them costs the same, and every
    sequence weighs alike with the aggregation that goes with it. Source: GSPO (arXiv:2507.18071).
    verl hands the gradient of s to each token by a stop-gradient, slime to all through the mean:
    under a mean over sequences that is one gradient, which the test holds; under one over tokens
    slime's grows with the length (LUSPO, arXiv:2602.05261). Bounds this narrow saturate under lag.
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
        ratio = sequence_means(log_ratio(logprobs, tokens), tokens).exp()
        advantages = advantages_of(tokens)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        is_clipped = clipped.detach() < (ratio * advantages).detach()
        return TokenLoss(-(ratio * advantages).minimum(clipped), {"loss/clip_fraction": is_clipped})
