"""Importance weights, masked outside a band."""

from typing import Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import ANCHORS, Correction, Needs, Tokens, TokenWeights
from relax_hpc.algorithms.ratios import weight_logs
from relax_hpc.sections import Number


class IcepopCorrection(Correction):
    """w_t = pi_old / mu if low <= pi_old / mu <= high, else 0.

    If trainer and sampler disagree this much, the token is dropped rather than capped. Source:
    IcePop (arXiv:2510.18855), .5 to 5; slime and AReaL agree.
    """

    name: Literal["icepop"] = "icepop"
    low: Annotated[Number, Field(ge=0, lt=1)] = 0.5
    """Least trusted ratio."""
    high: Annotated[Number, Field(gt=1)] = 5.0
    """Largest trusted ratio."""

    def needs(self) -> Needs:
        return Needs(anchors=ANCHORS)

    def of_tokens(self, tokens: Tokens) -> TokenWeights:
        ratio = weight_logs(tokens).exp()
        kept = (ratio >= self.low) & (ratio <= self.high)
        weights = ratio.where(kept, 0.0)
        metrics = {"loss/importance_mean": weights, "loss/importance_rejected": ~kept}
        return TokenWeights(weights, metrics)
