"""Runs inside SGLang: where buckets of weights come from.

By broadcast, or through memory that a trainer on the same GPU maps as well. Two buffers: while one
is copied to its places, the next bucket arrives.
"""

from datetime import timedelta
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world

from relax_hpc.comm.broadcast import Transfer, start_broadcast
from relax_hpc.comm.bucket import BucketPlan
from relax_hpc.comm.lanes import Taker
from relax_hpc.comm.orders import PLAN, Order
from relax_hpc.comm.patience import Patience
from relax_hpc.comm.streams import mark, new_stream

_BUFFERS = 2


class Source(Protocol):
    """The sender of buckets."""

    store: dist.Store
    """Store for messages besides the buckets."""
    rank: int
    """Number under which this rank leaves receipts."""
    plan: BucketPlan

    def bucket(self, index: int) -> Tensor:
        """[size] uint8, where bucket `index` is once it has arrived."""
        ...

    def take_over(self, other: "Source") -> bool:
        """Goes on in the buffers of another one, if the same arrives in them; returns whether."""
        ...

    def warm_up(self, patience: Patience) -> None:
        """Does once what takes longer the first time."""
        ...

    def fetch(self, index: int, order: Order, patience: Patience) -> None:
        """Bucket `index` is there for what the current stream is given from here on."""
        ...

    def free(self, index: int, order: Order) -> None:
        """Nothing that the current stream is given from here on reads bucket `index`."""
        ...

    def abort(self) -> None:
        """Ends what the GPU waits for."""
        ...


class BroadcastSource:
    """A weight group that SGLang has joined."""

    def __init__(self, order: Order, device: torch.device) -> None:
        self._group, self.store = _find(order.group)
        self.rank = self._group.rank()
        self.store.wait([PLAN], timedelta(seconds=order.timeout_s))
        self.plan = BucketPlan.from_json(self.store.get(PLAN).decode())
        self._device, self._stream = device, new_stream(device)
        self._free = dict[int, torch.cuda.Event]()
        """Buffer -> when what was in it has been made use of."""

    def bucket(self, index: int) -> Tensor:
        return self._flat[index % len(self._flat)][: self.plan.sizes[index]]

    def take_over(self, other: Source) -> bool:
        if not isinstance(other, BroadcastSource) or other.plan != self.plan:
            return False
        self._flat = other._flat
        return True

    def warm_up(self, patience: Patience) -> None:
        """Uses the wire once, so that the first update is as fast as the others."""
        self._wait(start_broadcast(self._group, self.bucket(0)), patience)

    def fetch(self, index: int, order: Order, patience: Patience) -> None:
        if self._stream is None:
            self._wait(start_broadcast(self._group, self.bucket(index)), patience)
            return
        if free := self._free.get(index % len(self._flat)):
            self._stream.wait_event(free)
        with torch.cuda.stream(self._stream):
            start_broadcast(self._group, self.bucket(index)).order_after()
        torch.cuda.current_stream().wait_stream(self._stream)

    def free(self, index: int, order: Order) -> None:
        if self._stream:
            self._free[index % len(self._flat)] = mark()

    def abort(self) -> None:
        self._group.abort()

    @cached_property
    def _flat(self) -> list[Tensor]:
        return self.plan.buffers(min(_BUFFERS, len(self.plan.buckets)), self._device)

    def _wait(self, transfer: Transfer, patience: Patience) -> None:
        transfer.wait(patience.deadline, patience.check)


class LaneSource:
    """Memory of the trainer's rank on this GPU."""

    def __init__(self, order: Order, device: torch.device) -> None:
        self._taker = Taker(order, device)
        self.store, self.rank = self._taker.store.shelf, order.lane
        self.plan = self._taker.plan

    def bucket(self, index: int) -> Tensor:
        return self._taker.bucket(index)

    def take_over(self, other: Source) -> bool:
        """Never: the memory is another trainer's."""
        return False

    def warm_up(self, patience: Patience) -> None:
        """The memory is mapped already."""

    def fetch(self, index: int, order: Order, patience: Patience) -> None:
        self._taker.wait_for(index, order, patience)

    def free(self, index: int, order: Order) -> None:
        self._taker.give_back(index, order)

    def abort(self) -> None:
        """No GPU waits for a lane."""


def source_of(order: Order, model: nn.Module) -> Source:
    """The source that an order names.

    Raises:
        RuntimeError: its trainer is gone.
        StopIteration: the engine has not joined the group.
    """
    device = next(model.parameters()).device
    return BroadcastSource(order, device) if order.group else LaneSource(order, device)


def _find(name: str) -> tuple[dist.ProcessGroup, dist.Store]:
    """The group that SGLang joined under `name`, and its store."""
    group = next(group for group, known in _world.pg_names.items() if known == name)
    return group, _world.pg_map[group][1]
