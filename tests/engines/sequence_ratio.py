"""A second algorithm, as somebody would add it: one file, and a line of the table.

    loss = -sum_i min(s_i A_i, clip(s_i, 1 - e, 1 + e) A_i),  s_i = exp(mean_t log r_it)

over sequences i; the mean is over sequences. Source: GSPO (arXiv:2507.18071).
"""

from typing import Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.algorithm import Algorithm, LossOutput, Needs, Settings
from relax_hpc.sections import Number


class GspoSettings(Settings):
    name: Literal["gspo"] = "gspo"
    epsilon: Annotated[Number, Field(gt=0)] = 4e-4
    """A sequence's ratio stays within 1 - epsilon and 1 + epsilon."""


def _advantages(_, rows):
    return rows.rewards - rows.rewards.mean(axis=1, keepdims=True)


def _loss(settings, _):
    import torch

    from relax_hpc.algorithms.segments import mean_over

    def loss(logprobs, tokens):
        count, mask, ids = len(tokens.groups), tokens.loss_mask, tokens.sequence_ids
        log_ratio = mean_over(logprobs - tokens.columns["old_logprobs"], ids, mask, count)
        worth = mean_over(tokens.columns["advantages"], ids, mask, count)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.epsilon)
        value = -torch.minimum(ratio * worth, clipped * worth).sum()
        trained = mean_over(torch.ones_like(logprobs), ids, mask, count)
        return LossOutput(value, {"loss/ratio": ratio.detach().sum()}, trained.sum())

    return loss


GSPO = Algorithm(
    "gspo",
    GspoSettings,
    _loss,
    _advantages,
    lambda _, advantages: advantages != 0,
    needs=lambda _: Needs(min_siblings=2),
)
