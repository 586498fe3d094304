"""No correction."""

from typing import Literal

from relax_hpc.algorithms.part import Correction, Tokens, TokenWeights


class NoCorrection(Correction):
    """w = 1. With anchor rollout the loss has the ratio to the sampler itself."""

    name: Literal["none"] = "none"

    def of_tokens(self, tokens: Tokens) -> TokenWeights:
        return TokenWeights(tokens.columns["advantages"].new_ones(tokens.loss_mask.shape))

    @property
    def has_ratios(self) -> bool:
        return False
