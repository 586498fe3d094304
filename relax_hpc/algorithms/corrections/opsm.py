"""Off-policy sequence masking: stops unlearning bad responses that the policy has already left."""

from typing import Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import ANCHORS, Correction, Needs, Tokens, TokenWeights
from relax_hpc.algorithms.ratios import advantages_of, sequence_means, weight_logs
from relax_hpc.sections import Number


class Opsm(Correction):
    """w = 0 where A < 0 and mean over the sequence of log(mu / pi_old) > delta, else 1.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), which names no delta: there is no default. slime uses
    1e-4, TRL suggests 0.5. Both compare with the current policy, TRL the sampler, slime the policy
    before the step. Here the sampler is compared with the policy before the step, which captures
    the lag.
    """

    name: Literal["opsm"] = "opsm"
    delta: Annotated[Number, Field(gt=0)]
    """Largest mean of log(mu / pi_old), nats per token, of a sequence that is still unlearned."""

    @property
    def has_ratios(self) -> bool:
        return False

    def needs(self) -> Needs:
        return Needs(anchors=ANCHORS)

    def of_tokens(self, tokens: Tokens) -> TokenWeights:
        left = sequence_means(-weight_logs(tokens), tokens) > self.delta
        rejected = left & (advantages_of(tokens) < 0)
        weights = (~rejected).to(tokens.columns["advantages"].dtype)
        return TokenWeights(weights, {"loss/importance_rejected": rejected})
