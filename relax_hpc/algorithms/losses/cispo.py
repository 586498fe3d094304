"""The policy gradient with capped weights: no token is left out."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Loss, TokenLoss, Tokens
from relax_hpc.algorithms.ratios import advantages_of, log_ratio
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor


class Cispo(Loss):
    """loss_t = -sg(min(r, cap)) A log pi, r = pi / anchor; sg: no gradient.

    A token beyond the cap still teaches, with the cap's weight. No lower bound. Sources: MiniMax-M1
    (arXiv:2506.13585); cap 5: ScaleRL (arXiv:2510.13786). The cap applies to the ratio itself, as
    in TRL; slime, verl and AReaL take 1 + epsilon, and verl by default bounds below, too, at .8 and
    1.2, which is not CISPO.
    """

    name: Literal["cispo"] = "cispo"
    cap: Annotated[Number, Field(gt=0)] = 5.0
    """Largest weight."""

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        ratio = log_ratio(logprobs, tokens).detach().exp()
        weights = ratio.clamp(max=self.cap) * advantages_of(tokens)
        loss = -weights * logprobs.where(tokens.loss_mask, 0.0)
        return TokenLoss(loss, {"loss/clip_fraction": ratio > self.cap})
