"""Rejects sequences by the geometric mean of their ratios between trainer and sampler."""

from typing import Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import ANCHORS, Correction, Needs, Tokens, TokenWeights
from relax_hpc.algorithms.ratios import sequence_means, weight_logs
from relax_hpc.sections import Number


class RejectGeometric(Correction):
    """w = 1 if low <= exp(mean over the sequence of log(pi_old / mu)) <= high, else 0.

    A rejected token still counts in the loss's mean; in verl it does not. Source: verl's rollout
    correction (`seq_mean_k1`), .999 to 1.001, whose bounds are of mu / pi_old: ours of pi_old / mu.
    SkyRL, .99 to 1.01, and AReaL have the same, of pi_old / mu.
    """

    name: Literal["reject_geometric"] = "reject_geometric"
    low: Annotated[Number, Field(ge=0, lt=1)] = 0.999
    """Least geometric mean of a sequence's ratios."""
    high: Annotated[Number, Field(gt=1)] = 1.001
    """Largest geometric mean of a sequence's ratios."""

    @property
    def has_ratios(self) -> bool:
        return False

    def needs(self) -> Needs:
        return Needs(anchors=ANCHORS)

    def of_tokens(self, tokens: Tokens) -> TokenWeights:
        ratio = sequence_means(weight_logs(tokens), tokens).exp()
        rejected = (ratio < self.low) | (ratio > self.high)
        weights = (~rejected).to(tokens.columns["advantages"].dtype)
        return TokenWeights(weights, {"loss/importance_rejected": rejected})
