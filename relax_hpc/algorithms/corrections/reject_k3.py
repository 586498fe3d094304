"""Rejects sequences by the divergence between trainer and sampler."""

from typing import Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import ANCHORS, Correction, Needs, Tokens, TokenWeights
from relax_hpc.algorithms.ratios import sequence_means, weight_logs
from relax_hpc.sections import Number


class RejectK3(Correction):
    """w = 1 if the mean over the sequence of r - 1 - log r is at most `limit`, else 0; r =
    pi_old / mu.

    The mean estimates KL(mu || pi_old) with nonnegative terms, so that ratios on both sides of 1 do
    not cancel. A rejected token still counts in the loss's mean; in verl it does not. Source:
    verl's rollout correction (`seq_mean_k3`), .01; AReaL has the same (`kl_k3`, by sequence).
    """

    name: Literal["reject_k3"] = "reject_k3"
    limit: Annotated[Number, Field(gt=0)] = 0.01
    """Largest mean of k3 of a sequence, nats."""

    @property
    def has_ratios(self) -> bool:
        return False

    def needs(self) -> Needs:
        return Needs(anchors=ANCHORS)

    def of_tokens(self, tokens: Tokens) -> TokenWeights:
        logs = weight_logs(tokens)
        rejected = sequence_means(logs.exp() - 1 - logs, tokens) > self.limit
        weights = (~rejected).to(tokens.columns["advantages"].dtype)
        return TokenWeights(weights, {"loss/importance_rejected": rejected})
