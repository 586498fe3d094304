"""Parts of the tensors of a whole model that one rank has: boxes, whatever the grid.

A checkpoint names every part by its place in the whole tensor, so that ranks of another grid find
what they need. A data-parallel rank has the optimizer state of a range of elements of a parameter's
shard, from somewhere within a row to somewhere within another: at most five boxes of a matrix.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor


class Box(NamedTuple):
    """A part of a tensor of the whole model, or the place where it is to go."""

    key: str
    offset: tuple[int, ...]
    """Indices of the first element in the whole tensor."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    tensor: Tensor


def of_shard(shard: ShardedTensor) -> Box:
    """The whole of what a rank has of a tensor."""
    ones = (1,) * shard.prepend_axis_num
    data = shard.data.detach().view(*ones, *shard.local_shape)
    return Box(shard.key, tuple(shard.global_offset), tuple(shard.global_shape), data)


def of_range(
    shard: ShardedTensor, parameter: Tensor, key: str, start: int, flat: Tensor
) -> Iterator[Box]:
    """Boxes of a range of a parameter's elements.

    Args:
        shard: of the parameter or a view of it.
        key: of the boxes.
        start: first element of the range, counted through the parameter.
        flat: [n] what goes with each element of the range.
    """
    data, ones = shard.data, (1,) * shard.prepend_axis_num
    assert data.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr(), shard.key
    first = data.storage_offset() - parameter.storage_offset()
    stop = start + flat.numel()
    for place, shape, position in cut(tuple(data.shape), data.stride(), first, start, stop):
        within = (0,) * shard.prepend_axis_num + place
        offset = tuple(a + b for a, b in zip(shard.global_offset, within, strict=True))
        part = flat[position - start :][: math.prod(shape)].view(*ones, *shape)
        yield Box(key, offset, tuple(shard.global_shape), part)


_Cut = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offset and shape of a box in a tensor, and position of its first element in memory."""


def cut(
    shape: Sequence[int], strides: Sequence[int], first: int, start: int, stop: int
) -> Iterator[_Cut]:
    """Boxes of a strided tensor, each contiguous in memory, that make up its part in a range.

    Args:
        first: position of the tensor's first element in memory.
        start: of the range in memory, which ends before `stop`.
    """
    if tuple(strides) == _row_major(shape):
        begin, end = max(start - first, 0), min(stop - first, math.prod(shape))
        for place, size, position in _rows(tuple(shape), begin, end):
            yield place, size, first + position
        return
    assert len(shape) > 1, f"elements {strides[0]} apart: such a view has no boxes"
    for row in range(shape[0]):
        inner = cut(shape[1:], strides[1:], first + row * strides[0], start, stop)
        for place, size, position in inner:
            yield (row, *place), (1, *size), position


def _rows(shape: tuple[int, ...], begin: int, end: int) -> Iterator[_Cut]:
    """Boxes of elements begin <= i < end of a contiguous tensor, in order."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield (begin,) * len(shape), (end - begin,) * len(shape), begin
        return
    size = math.prod(shape[1:])
    head = min(-(-begin // size) * size, end)  # where a broken first row ends
    tail = max(end // size * size, head)  # where a broken last one begins
    yield from _within_row(shape, begin, head)
    if head < tail:
        rows = (tail - head) // size
        yield (head // size, *[0] * len(shape[1:])), (rows, *shape[1:]), head
    yield from _within_row(shape, tail, end)


def _within_row(shape: tuple[int, ...], begin: int, end: int) -> Iterator[_Cut]:
    size = math.prod(shape[1:])
    row, low = begin // size, begin // size * size
    for place, inner, position in _rows(shape[1:], begin - low, end - low):
        yield (row, *place), (1, *inner), low + position


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
