"""Supervised fine-tuning: the mean of the cross entropy over the trained tokens of documents."""

from typing import TYPE_CHECKING

from relax_hpc.algorithms.part import LossOutput, Tokens

if TYPE_CHECKING:
    from torch import Tensor


def cross_entropy(logprobs: "Tensor", tokens: Tokens) -> LossOutput:
    """Negative log-likelihood of the trained tokens.

    Args:
        logprobs: [T] nats, with gradient.
        tokens: documents.
    """
    return LossOutput(-logprobs.where(tokens.loss_mask, 0.0).sum(), {})
