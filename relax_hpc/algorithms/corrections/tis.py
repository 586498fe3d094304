"""Truncated importance weights."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from relax_hpc.algorithms.part import Anchor, Correction, Needs, Tokens, TokenWeights
from relax_hpc.sections import Number


class Tis(Correction):
    """w_t = min(pi_old / mu, cap): mu sampled the token, pi_old is the policy before the step.

    Corrects both for an older policy and for the engine's arithmetic; the cap bounds the variance
    at the price of a bias. Sources: truncated importance sampling, Ionides (2008); its use between
    sampler and trainer follows AReaL's decoupled objective (arXiv:2505.24298).
    """

    name: Literal["tis"] = "tis"
    cap: Annotated[Number, Field(gt=0)] = 2.0
    """Largest weight."""

    def needs(self) -> Needs:
        return Needs(anchors=frozenset(get_args(Anchor)))

    def of_tokens(self, tokens: Tokens) -> TokenWeights:
        columns = tokens.columns
        gap = (columns["old_logprobs"] - columns["rollout_logprobs"]).where(tokens.loss_mask, 0.0)
        weights = gap.exp().clamp(max=self.cap).detach()
        metrics = {
            "loss/importance_mean": weights,
            "loss/importance_capped": weights >= self.cap,
        }
        return TokenWeights(weights, metrics)
