"""Rows that are copied to where they are needed, and summed on the way back.

n = rows before, m = copies; every row goes to at most k places. No sum is an atomic addition: the
same rows give the same bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Moves(NamedTuple):
    """A map from rows to places, and back."""

    row: Tensor
    """[m] int64, the row that a place holds a copy of."""
    destination: Tensor
    """[m] int64, ascending."""
    places: Tensor
    """[n, k] int64, where copies of a row are; -1 for none."""


def moves(goes: Tensor, count: int, most: int) -> Moves:
    """Copies ordered by destination, then by row.

    Args:
        goes: [n, destinations] bool.
        count: how many of them are True; known before, so that nobody waits for the device.
        most: largest number of destinations of a row.
    """
    num_rows = max(len(goes), 1)
    by_destination = goes.t().reshape(-1)
    flat = torch.nonzero_static(by_destination, size=count)[:, 0]
    row = flat % num_rows
    nth = goes.cumsum(1, dtype=torch.int32).t().reshape(-1)[flat] - 1  # of the row's destinations
    places = flat.new_full((len(goes) * most,), -1)
    places[row * most + nth] = torch.arange(count, device=flat.device)
    return Moves(row, flat // num_rows, places.view(len(goes), most))


def spread(rows: Tensor, moves: Moves) -> Tensor:
    """[n, h] -> [m, h], copies."""
    return _spread(rows, moves)


def collect(copies: Tensor, moves: Moves) -> Tensor:
    """[m, h] -> [n, h], the sum of a row's copies; float32 inside, 0 for none."""
    return _collect(copies, moves)


def take(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], without gradient."""
    if rows.is_cuda:
        from relax_hpc.engines.megatron.moe import kernels as kernels_moe

        return kernels_moe.take_rows(rows.contiguous(), index)
    return rows.index_select(0, index)


def total(copies: Tensor, places: Tensor) -> Tensor:
    """[n, h] sums of the copies at `places`, without gradient."""
    if copies.is_cuda:
        from relax_hpc.engines.megatron.moe import kernels as kernels_moe

        return kernels_moe.sum_rows(copies.contiguous(), places)
    if not len(copies):
        return copies.new_zeros(len(places), copies.shape[1])
    found = copies[places.clamp(min=0)].float().where((places >= 0)[..., None], 0.0)
    return found.sum(1).to(copies.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, moves: Moves) -> Tensor:  # noqa: ANN401
        ctx.moves = moves
        return take(rows, moves.row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return total(grad, ctx.moves.places), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, moves: Moves) -> Tensor:  # noqa: ANN401
        ctx.moves = moves
        return total(copies, moves.places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return take(grad, ctx.moves.row), None


_spread: Callable[[Tensor, Moves], Tensor] = _Spread.apply
_collect: Callable[[Tensor, Moves], Tensor] = _Collect.apply
