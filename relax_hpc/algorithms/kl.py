"""Distances of the policy from a reference."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import Needs, Part, TokenLoss, Tokens
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 20.0
"""Largest log pi_ref - log pi: e**20 is far beyond what a gradient survives, and still finite."""


class Kl(Part):
    """An estimate of KL(pi || pi_ref) per token: never negative, unbiased for tokens from pi.

        kl_t = exp(d_t) - d_t - 1,    d_t = ref_logprobs_t - logprobs_t

    Source: GRPO (arXiv:2402.03300) eq. 4; Schulman, "Approximating KL divergence" (2020), k3.
    """

    name: Literal["k3"] = "k3"
    coefficient: Annotated[Number, Field(ge=0)] = 0.001
    """Weight of the divergence in the loss; 0 only measures. Above 0 needs a reference."""

    def needs(self) -> Needs:
        if not self.coefficient:
            return Needs()
        key = f"algorithm.kl.coefficient = {self.coefficient}"
        return Needs({"ragged/ref_logprobs": key}, every_row=True)

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        """The estimate of each token, without the coefficient."""
        # Masked positions may hold garbage; garbage * 0 is nan, so select before.
        gap = (tokens.columns["ref_logprobs"] - logprobs).where(tokens.loss_mask, 0.0)
        gap = gap.clamp(max=_LARGEST)
        kl = gap.exp() - gap - 1
        return TokenLoss(kl, {"kl/mean": kl.detach()})


class NoKl(Part):
    """Nothing pulls; with a reference, k3 is measured."""

    name: Literal["none"] = "none"
