"""Tokens to the ranks that have their experts, and the experts' outputs back.

t = tokens of this rank, h = hidden size, E = experts, L of them on a rank; G = ranks that share
them: expert parallel x expert-tensor parallel. A token is sent once to a rank, however many of its
experts are there, and comes back as one partial sum: with 8 experts per token on 4 ranks that is
less than half of what one copy per expert takes. Ranks of an expert-tensor-parallel group are sent
the same tokens, and their partial sums add up like those of other ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.engines.megatron.moe.experts import Groups
from relax_hpc.engines.megatron.moe.permutation import Moves, collect, moves, spread, take


class Sharing(NamedTuple):
    """The ranks that share the experts, expert-tensor-parallel ones side by side."""

    group: dist.ProcessGroup
    expert_parallel: int

    @property
    def expert_tensor_parallel(self) -> int:
        return self.group.size() // self.expert_parallel


class Exchange(NamedTuple):
    """Rows sent to and received from each rank."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: dist.ProcessGroup

    @property
    def reverse(self) -> "Exchange":
        return Exchange(self.received, self.sent, self.group)


@dataclass(frozen=True)
class Dispatch:
    """The moves of one forward's tokens to experts."""

    outward: Moves | None
    """Tokens to ranks; None if there is but one."""
    exchange: Exchange
    inward: Moves
    """Rows that arrived to experts of this rank."""
    weights: Tensor
    """[M] float32 of the router, with gradient, for the M rows of this rank's experts."""
    groups: Groups

    def send(self, rows: Tensor) -> Tensor:
        """[t, h] -> [M, h], ordered by expert; with gradient."""
        if self.outward is not None:
            rows = exchanged(spread(rows, self.outward), self.exchange)
        return spread(rows, self.inward)

    def send_again(self, rows: Tensor) -> Tensor:
        """The same, without gradient; as collective as the first time."""
        if self.outward is not None:
            rows = _all_to_all(take(rows, self.outward.row), self.exchange)
        return take(rows, self.inward.row)

    def back(self, rows: Tensor) -> Tensor:
        """[M, h] -> [t, h], summed over experts."""
        rows = collect(rows, self.inward)
        if self.outward is None:
            return rows
        return collect(exchanged(rows, self.exchange.reverse), self.outward)


def plan(
    weights: Tensor, chosen: Tensor, sharing: Sharing, *, per_token: int, to_all: bool = False
) -> Dispatch:
    """Finds out what goes where. Waits for the device once.

    Args:
        weights: [t, E] float32, of the router, with gradient; at least 0 where chosen.
        chosen: [t, E] bool.
        per_token: most experts of a token.
        to_all: every token goes to every rank.
    """
    size, tokens = sharing.group.size(), len(chosen)
    marked = weights.where(chosen, -1.0).view(tokens, sharing.expert_parallel, -1)
    local = marked.shape[2]
    goes = chosen.new_ones(tokens, size)
    if not to_all:
        goes = chosen.view(marked.shape).any(2)
        goes = goes.repeat_interleave(sharing.expert_tensor_parallel, dim=1)
    table = _table(torch.cat([goes.sum(0), chosen.sum(0)]), sharing.group)
    me = sharing.group.rank()
    exchange = Exchange(table[me][:size], tuple(row[me] for row in table), sharing.group)
    first = size + me // sharing.expert_tensor_parallel * local
    counts = tuple(map(sum, zip(*(row[first : first + local] for row in table), strict=True)))
    outward = None
    arrived = marked.view(tokens, -1)
    if size > 1:
        outward = moves(goes, sum(exchange.sent), size)
        owner = outward.destination // sharing.expert_tensor_parallel
        part = outward.row * sharing.expert_parallel + owner
        arrived = exchanged(marked.view(-1, local).index_select(0, part), exchange)
    inward = moves(arrived >= 0, sum(counts), min(per_token, local))
    flat = inward.row * local + inward.destination
    return Dispatch(
        outward, exchange, inward,
        arrived.reshape(-1).index_select(0, flat), Groups.of(counts, chosen.device),
    )  # fmt: skip


def _table(numbers: Tensor, group: dist.ProcessGroup) -> Sequence[tuple[int, ...]]:
    """Every rank's numbers."""
    table = numbers.new_empty(group.size(), len(numbers))
    dist.all_gather(list(table), numbers, group=group)
    return [tuple(row) for row in table.tolist()]


def exchanged(rows: Tensor, exchange: Exchange) -> Tensor:
    """[sum of sent, ...] -> [sum of received, ...], with gradient."""
    return _exchange(rows, exchange)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:  # noqa: ANN401
        ctx.exchange = exchange
        return _all_to_all(rows, exchange)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _all_to_all(grad, ctx.exchange.reverse), None


_exchange: Callable[[Tensor, Exchange], Tensor] = _Exchange.apply


def _all_to_all(rows: Tensor, exchange: Exchange) -> Tensor:
    sent, received = list(exchange.sent), list(exchange.received)
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=exchange.group)
    return out
