"""Losses that keep experts equally busy.

t = tokens of a micro-batch on this rank, E = experts, k = experts per token. Like all losses here
they are sums over trained tokens, in the same mean: a group of tokens (a micro-batch, a document)
counts as much as its trained tokens weigh, and padding is in none. So what a document adds does not
depend on how many micro-batches there are, and one without trained tokens adds nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.engines.megatron.packing import MicroBatch


@dataclass(frozen=True)
class Documents:
    """The documents that tokens belong to."""

    index: Tensor
    """[t] int64; that of padding is the last."""
    trained: Tensor
    """[documents + 1] float32, trained tokens of each, on all ranks that share them."""
    weights: Tensor
    """[documents + 1] float32, sum of what those weigh in the loss."""

    @classmethod
    def of(cls, micro_batch: MicroBatch, weights: Tensor | None = None) -> "Documents":
        """Makes the documents of all tokens of the micro-batch.

        Args:
            weights: [T] of trained tokens in the loss; None if they count the same.
        """
        index = micro_batch.is_first.cumsum(0) - 1

        def summed(values: Tensor) -> Tensor:
            none = torch.zeros(len(micro_batch.rows) + 1, device=index.device)
            return none.index_add_(0, index, values)

        trained = summed(micro_batch.loss_mask.float())
        if weights is None:
            return cls(index, trained, trained)
        return cls(index, trained, summed(weights.where(micro_batch.loss_mask, 0.0)))

    @property
    def is_real(self) -> Tensor:
        """[t] bool, False on padding."""
        return self.index < len(self.trained) - 1


class Groups(NamedTuple):
    """Sums over groups of tokens: the whole micro-batch, or its documents."""

    counts: Tensor
    """[groups, E] how often an expert was chosen, by the tokens of all ranks that share them."""
    mass: Tensor
    """[groups, E] sum of the router's scores, with gradient, of this rank's tokens."""
    trained: Tensor
    """[groups] trained tokens of all ranks that share them."""
    weights: Tensor
    """[groups] sum of what those weigh in the loss."""


class BalanceLoss(NamedTuple):
    """A sum over trained tokens."""

    weighted: Tensor
    """[] this rank's part, as the tokens weigh in the loss; with gradient."""
    measured: Tensor
    """[] the same with each token once; without gradient."""

    @classmethod
    def of(cls, each: Tensor, weights: Tensor, trained: Tensor) -> "BalanceLoss":
        """Weighs the losses of groups."""
        return cls((weights * each).sum(), (trained * each.detach()).sum())


def micro_batch_groups(
    scores: Tensor, chosen: Tensor, documents: Documents, sharing: dist.ProcessGroup
) -> Groups:
    """One group of all tokens but padding.

    Args:
        scores: [t, E] of the router, with gradient; they add up to 1.
        chosen: [t, E] bool.
        sharing: ranks that share the tokens of the micro-batch.
    """
    real = documents.is_real[:, None]
    counts = (chosen & real).sum(0, keepdim=True).float()
    dist.all_reduce(counts, group=sharing)
    mass = (scores * real).sum(0, keepdim=True)
    return Groups(counts, mass, documents.trained.sum()[None], documents.weights.sum()[None])


def document_groups(
    scores: Tensor, chosen: Tensor, documents: Documents, sharing: dist.ProcessGroup
) -> Groups:
    """A group per document; as for `micro_batch_groups`."""
    none = scores.new_zeros(len(documents.trained), scores.shape[1])
    counts = none.index_add(0, documents.index, chosen.to(scores.dtype))[:-1]
    dist.all_reduce(counts, group=sharing)
    mass = none.index_add(0, documents.index, scores)[:-1]
    return Groups(counts, mass, documents.trained[:-1], documents.weights[:-1])


def balance_loss(groups: Groups, experts_per_token: int, busy: Tensor | None = None) -> BalanceLoss:
    """Sum over groups of weight x E x sum over experts of (share of choices) x (mean score).

    Args:
        busy: [E] choices that the shares are of, if not the groups' own.

    Returns:
        1 x its weight per trained token when all experts are equally busy.

    Source: Switch Transformer (arXiv:2101.03961) eq. 4, with k choices per token as Megatron-core;
        `busy` over the global batch: arXiv:2501.11873.
    """
    choices = groups.counts.sum(1, keepdim=True).clamp(min=1)
    counts = groups.counts if busy is None else busy[None]
    share = counts / counts.sum(1, keepdim=True).clamp(min=1)
    mean = groups.mass * (experts_per_token / choices)
    num_experts = groups.counts.shape[1]
    each = (share * mean).sum(1)
    return BalanceLoss.of(each, groups.weights * num_experts, groups.trained * num_experts)


def z_loss(logits: Tensor, documents: Documents, sharing: dist.ProcessGroup) -> BalanceLoss:
    """[t, E] -> weight of trained tokens x mean of logsumexp^2 over all tokens but padding.

    Source: ST-MoE (arXiv:2202.08906) eq. 5.
    """
    real = documents.is_real
    tokens = real.sum().float()
    dist.all_reduce(tokens, group=sharing)
    squares = (logits.float().logsumexp(-1).square() * real).sum()
    tokens = tokens.clamp(min=1)
    return BalanceLoss.of(
        squares, documents.weights.sum() / tokens, documents.trained.sum() / tokens
    )
