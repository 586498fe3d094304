"""Features of media in the language model: in place of embeddings, and after its first layers.

R = features of all media of this replica, t = tokens of a micro-batch that this rank has. Gradients
of features are added up here over all rows that see a medium, not in the graph: towers are no part
of the pipeline's graph, and compute theirs afterwards, once per medium.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from relax_hpc.engines.megatron import grid
from relax_hpc.engines.megatron.attention import context_parallel
from relax_hpc.engines.megatron.packing import MicroBatch
from relax_hpc.engines.megatron.vision.host_memory import Window
from relax_hpc.engines.megatron.vision.stretches import Key


class Part(Protocol):
    """Features on the device, some or all of them."""

    @property
    def values(self) -> Tensor:
        """[rows, levels x h], without graph."""
        ...

    def sum(self) -> Tensor:
        """[rows, levels x h] float32 that gradients are added to."""
        ...

    def added(self, level: int) -> None:
        """Is told that the gradient of a level was added."""
        ...


@dataclass(frozen=True)
class Features:
    """The features of media, on every rank of the first stage."""

    values: Tensor
    """[R, levels x h], without graph; on the device, or in host memory."""
    gradient: Tensor | None
    """[R, levels x h] float32, of this rank's tokens, at the same place; None where no tower
    learns."""
    first: Mapping[Key, int]
    """First feature of each medium."""
    hidden_size: int
    anchor: Tensor
    """[] on the device that asks for a gradient, so that autograd comes by."""
    is_in_host_memory: bool = False
    """Whether that is the place of both."""

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
        device, rows = self.anchor.device, rows[tokens]
        if self.is_in_host_memory:
            window = Window(self.values, self.gradient, rows, device)
            return Seen(self, window, tokens.to(device), window.rows)
        return Seen(self, self, tokens.to(device), rows.to(device))

    @property
    def levels(self) -> int:
        return self.values.shape[1] // self.hidden_size

    def level(self, of: Tensor, number: int) -> Tensor:
        """[rows, h] of a level, a view of what a part has."""
        return of.narrow(1, number * self.hidden_size, self.hidden_size)

    def sum(self) -> Tensor:
        """`gradient`, where some tower learns."""
        assert self.gradient is not None
        return self.gradient

    def added(self, level: int) -> None:
        """Does nothing: gradients are where they stay."""


@dataclass(frozen=True)
class Seen:
    """The features that tokens of a micro-batch see."""

    features: Features
    part: Part
    """Some of these, on the device."""
    tokens: Tensor
    """[n] int64, of this rank's t."""
    rows: Tensor
    """[n] int64, of the rows of `part`."""

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
            taken = self.features.level(self.part.values, number).index_select(0, self.rows)
        else:
            taken = _take(self.features.anchor, self, number)
        return taken[:, None]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        anchor: Tensor,
        seen: Seen,
        number: int,
    ) -> Tensor:
        ctx.seen, ctx.number = seen, number
        return seen.features.level(seen.part.values, number).index_select(0, seen.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # noqa: ANN401
        seen, number = ctx.seen, ctx.number
        total = seen.features.level(seen.part.sum(), number)
        total.index_add_(0, seen.rows, grad.to(total.dtype))
        seen.part.added(number)
        return None, None, None


_take: Callable[[Tensor, Seen, int], Tensor] = _Take.apply
