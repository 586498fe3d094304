"""Rejects tokens by their ratio between trainer and sampler."""

from typing import Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import ANCHORS, Correction, Needs, Tokens, TokenWeights
from relax_hpc.algorithms.ratios import weight_logs
from relax_hpc.sections import Number


class RejectK1(Correction):
    """w_t = 1 if low <= pi_old / mu <= high, else 0.

    As the correction `icepop`, but with equal weights. A rejected token still counts in the loss's
    mean; in verl it does not. Source: verl's rollout correction (`token_k1`), whose bounds, .6 and
    1.4 in its manual, are of mu / pi_old: ours of pi_old / mu.
    """

    name: Literal["reject_k1"] = "reject_k1"
    low: Annotated[Number, Field(ge=0, lt=1)] = 0.6
    """Least trusted ratio."""
    high: Annotated[Number, Field(gt=1)] = 1.4
    """Largest trusted ratio."""

    @property
    def has_ratios(self) -> bool:
        return False

    def needs(self) -> Needs:
        return Needs(anchors=ANCHORS)

    def of_tokens(self, tokens: Tokens) -> TokenWeights:
        ratio = weight_logs(tokens).exp()
        rejected = (ratio < self.low) | (ratio > self.high)
        weights = (~rejected).to(tokens.columns["advantages"].dtype)
        return TokenWeights(weights, {"loss/importance_rejected": rejected})
