"""A loss of one's own, as somebody would add it: one file, and its name in the job.

    loss_it = -min(s_i A_i, clip(s_i, 1 - e, 1 + e) A_i),  s_i = exp(mean_t log r_it)

for the tokens t of sequences i. Source: GSPO (arXiv:2507.18071).
"""

from typing import Annotated

from pydantic import Field

from relax_hpc.algorithms.part import Loss, TokenLoss
from relax_hpc.sections import Number


class SequenceRatio(Loss):
    epsilon: Annotated[Number, Field(gt=0)] = 4e-4
    """A sequence's ratio stays within 1 - epsilon and 1 + epsilon."""

    @property
    def ratio_of(self):
        return "sequence"

    def of_tokens(self, logprobs, tokens):
        from relax_hpc.algorithms.segments import mean_over

        count, mask, ids = len(tokens.groups), tokens.loss_mask, tokens.sequence_ids
        log_ratio = mean_over(logprobs - tokens.columns["anchor_logprobs"], ids, mask, count)
        worth = mean_over(tokens.columns["advantages"], ids, mask, count)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon)
        loss = -(ratio * worth).minimum(clipped * worth)
        return TokenLoss(loss[ids], {"loss/ratio": ratio.detach()[ids]})


def algorithm(**settings):
    """The keys of a job that has it."""
    return {
        "aggregation": "sequence",
        "loss": {"name": f"{__file__}:SequenceRatio", "anchor": "old", **settings},
        "correction": {"name": "none"},
    }
