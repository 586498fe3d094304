"""Features of media in the language model: in place of embeddings, and after its first layers.

R = features of all media of this replica, t = tokens of a micro-batch that this rank has. Gradients
of features are added up here over all rows that see a medium, not in the graph: towers are no part
of the pipeline's graph, and compute theirs afterwards, once per medium.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax_hpc.engines.megatron import grid
from relax_hpc.engines.megatron.attention import context_parallel
from relax_hpc.engines.megatron.packing import MicroBatch
from relax_hpc.engines.megatron.vision.stretches import Key


@dataclass(frozen=True)
class Features:
    """The features of media, on every rank of the first stage."""

    values: Tensor
    """[R, levels x h], without graph."""
    gradient: Tensor | None
    """[R, levels x h] float32, of this rank's tokens; None where no tower learns."""
    first: Mapping[Key, int]
    """First feature of each medium."""
    hidden_size: int
    anchor: Tensor
    """[] that asks for a gradient, so that autograd comes by."""

    def seen_by(self, micro_batch: MicroBatch, *, is_sequence_parallel: bool) -> "Seen | None":
        """Returns what this rank's tokens see; None if all of them are text."""
        rows = torch.full((len(micro_batch.token_ids),), -1, dtype=torch.int64)
        for stretch in micro_batch.stretches:
            begin = self.first[stretch.key] + stretch.offset
            rows[stretch.first : stretch.first + stretch.tokens] = torch.arange(
                begin, begin + stretch.tokens
            )
        group = grid.context_group()
        if group is not None:
            rows = context_parallel.own_part(rows, group)
        if is_sequence_parallel:
            rows = grid.own_tokens(rows)
        tokens = (rows >= 0).nonzero()[:, 0]
        if not len(tokens):
            return None
        device = self.values.device
        return Seen(self, tokens.to(device), rows[tokens].to(device))

    @property
    def levels(self) -> int:
        return self.values.shape[1] // self.hidden_size

    def level(self, of: Tensor, number: int) -> Tensor:
        """[R, h] of a level, a view of `values` or `gradient`."""
        return of.narrow(1, number * self.hidden_size, self.hidden_size)


@dataclass(frozen=True)
class Seen:
    """The features that tokens of a micro-batch see."""

    features: Features
    tokens: Tensor
    """[n] int64, of this rank's t."""
    rows: Tensor
    """[n] int64, of R."""

    def in_place_of(self, embedded: Tensor) -> Tensor:
        """[t, 1, h] embeddings -> the same, with features where media are."""
        return embedded.index_copy(0, self.tokens, self._level(0))

    def beside(self, hidden: Tensor, layer: int) -> Tensor:
        """[t, 1, h] that a layer has made -> the same, with the features of its level.

        Args:
            layer: number of it, from 0.
        """
        if layer + 1 >= self.features.levels:
            return hidden
        return hidden.index_add(0, self.tokens, self._level(layer + 1))

    def _level(self, number: int) -> Tensor:
        """[n, 1, h]"""
        if self.features.gradient is None:
            taken = self.features.level(self.features.values, number).index_select(0, self.rows)
        else:
            taken = _take(self.features.anchor, self.features, self.rows, number)
        return taken[:, None]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        anchor: Tensor,
        features: Features,
        rows: Tensor,
        number: int,
    ) -> Tensor:
        ctx.features, ctx.number = features, number
        ctx.save_for_backward(rows)
        return features.level(features.values, number).index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:  # noqa: ANN401
        (rows,) = ctx.saved_tensors
        total = ctx.features.level(ctx.features.gradient, ctx.number)
        total.index_add_(0, rows, grad.to(total.dtype))
        return None, None, None, None


_take: Callable[[Tensor, Features, Tensor, int], Tensor] = _Take.apply
