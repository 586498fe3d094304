"""Context parallelism of packed tokens: who owns which, and the exchanges, with their gradients.

T tokens of a micro-batch lie in `2 * size` equal chunks; rank r owns chunks r and 2 * size - 1 - r,
in this order: work grows towards the end of a document, and so everyone has some of either.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def chunks(total: int, size: int, rank: int) -> list[tuple[int, int]]:
    """[start, end) of what a rank owns; the whole for a size of 1."""
    if size == 1:
        return [(0, total)]
    width, rest = divmod(total, 2 * size)
    assert rest == 0, f"{total} tokens do not divide into {2 * size} chunks"
    return [(c * width, (c + 1) * width) for c in (rank, 2 * size - 1 - rank)]


def own_part(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, ...] of all -> [T / size, ...] of this rank."""
    parts = chunks(len(values), group.size(), group.rank())
    return torch.cat([values[start:end] for start, end in parts])


def gather_parts(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T / size, ...] of this rank -> [T, ...] of all, the same on every rank.

    Everyone is to compute the same from it: the gradient is this rank's part, not a sum over ranks.
    """
    return _gather(values, group)


def gather_keys(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """[T / size, groups, d] twice -> [T, groups, d] twice; the gradient is summed over ranks."""
    return _gather_and_sum(key, group), _gather_and_sum(value, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return _all_gather(values, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return own_part(grad, ctx.group), None


class _GatherAndSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return _all_gather(values, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        group = ctx.group
        by_rank = _chunked(grad, group.size())[_owned_order(group.size())]
        mine = grad.new_empty(len(grad) // group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(mine, by_rank.flatten(0, 1), group=group)
        return mine, None


_gather: Callable[[Tensor, dist.ProcessGroup], Tensor] = _Gather.apply
_gather_and_sum: Callable[[Tensor, dist.ProcessGroup], Tensor] = _GatherAndSum.apply


def _owned_order(size: int) -> list[int]:
    """Chunks as they come when the ranks' parts are put end to end."""
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]


def _all_gather(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    gathered = values.new_empty(len(values) * size, *values.shape[1:])
    dist.all_gather_into_tensor(gathered, values.contiguous(), group=group)
    order = _owned_order(size)
    places = [order.index(chunk) for chunk in range(2 * size)]
    return _chunked(gathered, size)[places].flatten(0, 1)


def _chunked(values: Tensor, size: int) -> Tensor:
    """[T, ...] -> [2 * size, T / (2 * size), ...]."""
    return values.view(2 * size, -1, *values.shape[1:])
