"""Features of media that lie in host memory, where they would fill a GPU's.

Each micro-batch brings the rows that it sees to the device, all levels at once, when its first
layer asks for them. Its gradient begins with what host memory has of these rows, and goes back
there when its backward is over: rows are added up in the same order as where all lie on the device.
Memory is pinned, and all copies are queued on the stream that computes, so that nobody waits for
one, and none overtakes another.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

_GRADIENT_BYTES = 4
_GATHERED_BYTES = 2**28
"""Bytes of features of all ranks that are on the device at once while they are exchanged."""


def is_needed(
    num_features: int, width: int, dtype: torch.dtype, *, learns: bool, most: float | None
) -> bool:
    """Says whether features, with their gradients, are too many for the device.

    Args:
        num_features: of all ranks, padding included.
        width: numbers of a feature, of all levels.
        dtype: of the features; gradients are float32.
        learns: there are gradients.
        most: GiB that may lie on the device; None is any number.
    """
    size = dtype.itemsize + _GRADIENT_BYTES * learns
    return most is not None and num_features * width * size > most * 2**30


def zeros(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, width] zeros in host memory, from which a device may copy by itself."""
    return torch.zeros(rows, width, dtype=dtype, pin_memory=device.type == "cuda")


def gathered(own: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """[R / ranks, w] in host memory -> [R, w] of all ranks, likewise; collective."""
    size, rows = group.size(), len(own)
    every = zeros(size * rows, own.shape[1], own.dtype, device)
    for piece in _pieces(own, size):
        part = own[piece].to(device, non_blocking=True)
        found = part.new_empty(size * len(part), part.shape[1])
        dist.all_gather_into_tensor(found, part, group=group)
        for mine, theirs in zip(every.chunk(size), found.chunk(size), strict=True):
            mine[piece].copy_(theirs, non_blocking=True)
    return every


def summed(every: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """[R, w] in host memory -> [R / ranks, w], this rank's part of the sum of all; collective."""
    size = group.size()
    own = zeros(len(every) // size, every.shape[1], every.dtype, device)
    for piece in _pieces(own, size):
        given = [part[piece].to(device, non_blocking=True) for part in every.chunk(size)]
        found = torch.empty_like(given[0])
        dist.reduce_scatter_tensor(found, torch.cat(given), group=group)
        own[piece].copy_(found, non_blocking=True)
    return own


def _pieces(own: Tensor, size: int) -> Iterator[slice]:
    """Yields parts of the rows of a rank that may be exchanged at once."""
    step = max(1, _GATHERED_BYTES // (size * own.shape[1] * own.element_size()))
    for first in range(0, len(own), step):
        yield slice(first, first + step)


class Window:
    """The features that a micro-batch sees, on the device; see `features.Part`."""

    def __init__(
        self, values: Tensor, gradient: Tensor | None, rows: Tensor, device: torch.device
    ) -> None:
        """Copies nothing yet.

        Args:
            values: [R, w] in host memory.
            gradient: likewise; None where no tower learns.
            rows: [n] int64 of R in host memory, each of which is there once or several times.
            device: of the micro-batch.
        """
        self._values, self._gradient, self._device = values, gradient, device
        distinct, local = torch.unique(rows, return_inverse=True)
        self.rows = local.to(device)
        """[n] int64 of the rows of `values`."""
        self._num_rows = len(distinct)
        ends = [*((distinct.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(distinct)]
        self._runs = [
            (int(distinct[begin]), begin, end) for begin, end in zip([0, *ends], ends, strict=False)
        ]
        """Rows that lie together: first of R, and first and end of those here."""
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

    def added(self, level: int) -> None:
        """Is told that the gradient of a level was added: that of the first one comes last."""
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
