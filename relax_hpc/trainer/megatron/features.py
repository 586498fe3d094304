"""Inserts features of media into the language model: as embeddings, and after its first layers.

R = features of all media of this replica, t = tokens of a micro-batch on this rank. Gradients of
features are summed here over all rows that see a medium, outside the graph: encoders are no part of
the pipeline's graph, and backpropagate afterwards, once per medium.

Features may lie in host memory if they would fill a GPU's. Then each micro-batch copies the rows
that it sees to the device, all levels at once, when its first layer needs them. Its gradient starts
with the rows' sum in host memory, and goes back there when its backward is over, so rows add up in
the same order as on the device. Memory is pinned, and all copies are queued on the compute stream,
so nothing waits for a copy and none overtakes another.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.trainer.megatron import grid
from relax_hpc.trainer.megatron.packing import Key, MicroBatch

_GRADIENT_BYTES = 4
_GATHERED_BYTES = 2**28
"""Bytes of features of all ranks on the device at once during an exchange."""


def needs_host_memory(
    num_features: int, width: int, dtype: torch.dtype, *, learns: bool, most: float | None
) -> bool:
    """Whether features, with their gradients, exceed the limit on the device.

    Args:
        dtype: of the features; gradients are float32.
        most: GiB on the device; None is no limit.
    """
    size = dtype.itemsize + _GRADIENT_BYTES * learns
    return most is not None and num_features * width * size > most * 2**30


def make_host_zeros(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns [rows, width] zeros in pinned host memory."""
    return torch.zeros(rows, width, dtype=dtype, pin_memory=device.type == "cuda")


def gather_on_host(own: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """[R / ranks, w] in host memory -> [R, w] of all ranks, likewise; collective."""
    size, rows = group.size(), len(own)
    every = make_host_zeros(size * rows, own.shape[1], own.dtype, device)
    for piece in _pieces(own, size):
        part = own[piece].to(device, non_blocking=True)
        found = part.new_empty(size * len(part), part.shape[1])
        dist.all_gather_into_tensor(found, part, group=group)
        for mine, theirs in zip(every.chunk(size), found.chunk(size), strict=True):
            mine[piece].copy_(theirs, non_blocking=True)
    return every


def sum_on_host(every: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """[R, w] in host memory -> [R / ranks, w], this rank's part of the sum of all; collective."""
    size = group.size()
    own = make_host_zeros(len(every) // size, every.shape[1], every.dtype, device)
    for piece in _pieces(own, size):
        given = [part[piece].to(device, non_blocking=True) for part in every.chunk(size)]
        found = torch.empty_like(given[0])
        dist.reduce_scatter_tensor(found, torch.cat(given), group=group)
        own[piece].copy_(found, non_blocking=True)
    return own


def _pieces(own: Tensor, size: int) -> Iterator[slice]:
    step = max(1, _GATHERED_BYTES // (size * own.shape[1] * own.element_size()))
    for first in range(0, len(own), step):
        yield slice(first, first + step)


class FeatureWindow:
    """The features that a micro-batch sees, on the device, where `Features` are in host memory."""

    def __init__(
        self, values: Tensor, gradient: Tensor | None, rows: Tensor, device: torch.device
    ) -> None:
        """Copies nothing yet.

        Args:
            values: [R, w] in host memory.
            gradient: likewise; None if no encoder is trained.
            rows: [n] int64 of R in host memory, maybe repeated.
        """
        self._values, self._gradient, self._device = values, gradient, device
        distinct, local = torch.unique(rows, return_inverse=True)
        self.rows = local.to(device)
        """[n] int64, indices into the rows of `values`."""
        self._num_rows = len(distinct)
        ends = [*((distinct.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(distinct)]
        self._runs = [
            (int(distinct[begin]), begin, end) for begin, end in zip([0, *ends], ends, strict=False)
        ]
        """Contiguous runs: first of R, and first and end of those here."""
        self._sum: Tensor | None = None
        self._is_over = False

    @cached_property
    def values(self) -> Tensor:
        """[rows that are seen, w]"""
        return self._brought(self._values)

    def sum(self) -> Tensor:
        """[rows that are seen, w] that gradients are added to."""
        assert self._gradient is not None and not self._is_over, (
            "gradients come from the last level"
        )
        if self._sum is None:
            self._sum = self._brought(self._gradient)
        return self._sum

    def note_added(self, level: int) -> None:
        """Notes that the gradient of a level was added: the first level comes last."""
        if level or self._sum is None:
            return
        assert self._gradient is not None
        for there, begin, end in self._runs:
            place = self._gradient[there : there + end - begin]
            place.copy_(self._sum[begin:end], non_blocking=True)
        self._sum, self._is_over = None, True

    def _brought(self, whole: Tensor) -> Tensor:
        here = torch.empty(self._num_rows, whole.shape[1], dtype=whole.dtype, device=self._device)
        for there, begin, end in self._runs:
            here[begin:end].copy_(whole[there : there + end - begin], non_blocking=True)
        return here


@dataclass(frozen=True)
class Features:
    """The features of media, on every rank of the first stage."""

    values: Tensor
    """[R, levels x h], without graph; on the device, or in host memory."""
    gradient: Tensor | None
    """[R, levels x h] float32, of this rank's tokens, at the same place; None if no encoder is
    trained."""
    first: Mapping[Key, int]
    """First feature of each medium."""
    hidden_size: int
    anchor: Tensor
    """[] on the device with requires_grad, so that autograd runs the backward."""
    is_in_host_memory: bool = False

    def select_seen(
        self, micro_batch: MicroBatch, *, is_sequence_parallel: bool
    ) -> "VisibleFeatures | None":
        """Returns the features of this rank's tokens; None if all of them are text."""
        rows = torch.full((len(micro_batch.token_ids),), -1, dtype=torch.int64)
        for span in micro_batch.feature_spans:
            begin = self.first[span.key] + span.offset
            rows[span.first : span.first + span.tokens] = torch.arange(begin, begin + span.tokens)
        rows = grid.own_part(rows)
        if is_sequence_parallel:
            rows = grid.own_tokens(rows)
        tokens = (rows >= 0).nonzero()[:, 0]
        if not len(tokens):
            return None
        device, rows = self.anchor.device, rows[tokens]
        if self.is_in_host_memory:
            window = FeatureWindow(self.values, self.gradient, rows, device)
            return VisibleFeatures(self, window, tokens.to(device), window.rows)
        return VisibleFeatures(self, self, tokens.to(device), rows.to(device))

    @property
    def levels(self) -> int:
        return self.values.shape[1] // self.hidden_size

    def level(self, of: Tensor, number: int) -> Tensor:
        """Returns [rows, h] of a level, as a view."""
        return of.narrow(1, number * self.hidden_size, self.hidden_size)

    def sum(self) -> Tensor:
        """[R, levels x h] float32 that gradients are added to."""
        assert self.gradient is not None
        return self.gradient

    def note_added(self, level: int) -> None:
        """Does nothing: gradients stay in place."""


@dataclass(frozen=True)
class VisibleFeatures:
    """The features that tokens of a micro-batch see."""

    features: Features
    part: Features | FeatureWindow
    """The features on the device, some or all of them."""
    tokens: Tensor
    """[n] int64, indices into this rank's t."""
    rows: Tensor
    """[n] int64, indices into the rows of `part`."""

    def in_place_of(self, embedded: Tensor) -> Tensor:
        """[t, 1, h] embeddings -> the same, with features at media tokens."""
        return embedded.index_copy(0, self.tokens, self._level(0))

    def beside(self, hidden: Tensor, layer: int) -> Tensor:
        """[t, 1, h] output of a layer -> the same, plus the features of its level.

        Args:
            layer: its number, from 0.
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
        seen: VisibleFeatures,
        number: int,
    ) -> Tensor:
        ctx.seen, ctx.number = seen, number
        return seen.features.level(seen.part.values, number).index_select(0, seen.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # noqa: ANN401
        seen, number = ctx.seen, ctx.number
        total = seen.features.level(seen.part.sum(), number)
        total.index_add_(0, seen.rows, grad.to(total.dtype))
        seen.part.note_added(number)
        return None, None, None


_take: Callable[[Tensor, VisibleFeatures, int], Tensor] = _Take.apply
