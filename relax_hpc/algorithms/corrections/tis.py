"""Truncated importance weights, by token."""

from typing import Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import ANCHORS, Correction, Needs, Tokens, TokenWeights
from relax_hpc.algorithms.ratios import weight_logs
from relax_hpc.sections import Number


class Tis(Correction):
    """w_t = min(pi_old / mu, cap): mu sampled the token, pi_old is the policy before the step.

    Corrects both for an older policy and for the engine's arithmetic; the cap trades variance for
    bias. Sources: truncated importance sampling, Ionides (2008); its use between sampler and
    trainer follows AReaL's decoupled objective (arXiv:2505.24298).
    """

    name: Literal["tis"] = "tis"
    cap: Annotated[Number, Field(gt=0)] = 2.0
    """Largest weight."""

    def needs(self) -> Needs:
        return Needs(anchors=ANCHORS)

    def of_tokens(self, tokens: Tokens) -> TokenWeights:
        weights = weight_logs(tokens).exp()
        capped = {"loss/importance_capped": weights >= self.cap}
        weights = weights.clamp(max=self.cap)
        return TokenWeights(weights, {"loss/importance_mean": weights, **capped})
