"""Importance weights within a band; a token outside is left out."""

from typing import Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import ANCHORS, Correction, Needs, Tokens, TokenWeights
from relax_hpc.algorithms.ratios import weight_logs
from relax_hpc.sections import Number


class IcepopCorrection(Correction):
    """w_t = pi_old / mu if low <= pi_old / mu <= high, else 0.

    Where trainer and sampler disagree this much, the token is not trusted at all, other than under
    a cap. Source: IcePop (arXiv:2510.18855), .5 to 5; slime and AReaL agree.
    """

    name: Literal["icepop"] = "icepop"
    low: Annotated[Number, Field(ge=0, lt=1)] = 0.5
    """Least ratio that is trusted."""
    high: Annotated[Number, Field(gt=1)] = 5.0
    """Largest ratio that is trusted."""

    def needs(self) -> Needs:
        return Needs(anchors=ANCHORS)

    def of_tokens(self, tokens: Tokens) -> TokenWeights:
        ratio = weight_logs(tokens).exp()
        kept = (ratio >= self.low) & (ratio <= self.high)
        weights = ratio.where(kept, 0.0)
        metrics = {"loss/importance_mean": weights, "loss/importance_rejected": ~kept}
        return TokenWeights(weights, metrics)
