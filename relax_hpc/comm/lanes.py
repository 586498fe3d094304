"""Weights from a rank of the trainer to the rank of an engine on the same GPU, without a wire.

Lane r belongs to rank r of the trainer: a few buffers that both map. A bucket is announced once its
buffer is full, and taken once the engine has made use of it; only then is the buffer filled again.
What is said goes through a store of rank 0's; nobody waits for anything but a key in it.
"""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.comm.bucket import BucketPlan
from relax_hpc.comm.orders import PLAN, Order, abort_key
from relax_hpc.comm.patience import Patience
from relax_hpc.comm.shared_memory import SharedMemory, attach
from relax_hpc.comm.torch_store import connect_store, shared_store
from relax_hpc.comm.world import World

_POLL_S = 1e-4


class Store:
    """A store of keys and texts through which ranks of the trainer and of engines speak."""

    def __init__(self, host: str, port: int, store: dist.Store) -> None:
        self.host, self.port, self._store = host, port, store

    @classmethod
    def of_trainer(cls, world: World, *, timeout_s: float) -> "Store":
        """Rank 0 opens it, on a free port; the others connect. Collective."""
        store = shared_store(world, timeout_s=timeout_s)
        return cls(store.host, store.port, store)

    @classmethod
    def connect(cls, address: str, timeout_s: float) -> "Store":
        """Connects an engine to the store whose address an order named.

        Raises:
            DistError: it is not there.
        """
        host, port = address.rsplit(":", 1)
        return cls(host, int(port), connect_store(host, int(port), None, timeout_s=timeout_s))

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def shelf(self) -> dist.Store:
        return self._store

    def put(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def has(self, key: str) -> bool:
        """Raises DistError if rank 0 is gone."""
        return bool(self._store.check([key]))

    def take(self, key: str, *, timeout_s: float) -> str:
        """A text that somebody leaves.

        Raises:
            DistError: nobody did within `timeout_s`.
        """
        self._store.wait([key], timedelta(seconds=timeout_s))
        text = self._store.get(key).decode()
        self._store.delete_key(key)
        return text

    def read(self, key: str) -> str:
        """A text that stays."""
        return self._store.get(key).decode()


class Giver:
    """The trainer's end of a lane; a `wire.Wire`."""

    def __init__(self, store: Store, lane: int, buffers: Sequence[SharedMemory]) -> None:
        self._store, self._lane = store, lane
        store.put(_buffers_key(lane), json.dumps([each.address for each in buffers]))
        self._serial = ""
        self._check: Callable[[], None] = lambda: None
        self._count = itertools.count()

    def begin(self, serial: str, check: Callable[[], None]) -> None:
        """Counts what is started from here on to the order `serial`.

        Args:
            check: called while it waits for the engine; what it raises ends the wait.
        """
        self._serial, self._check, self._count = serial, check, itertools.count()

    def start(self, tensor: Tensor) -> "_Handover":
        """Announces the next bucket."""
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()
        index = next(self._count)
        self._store.put(_key("full", self._serial, self._lane, index), "")
        taken = _key("taken", self._serial, self._lane, index)
        return _Handover(self._store, taken, self._check)


class _Handover:
    """A bucket that was announced."""

    def __init__(self, store: Store, taken: str, check: Callable[[], None]) -> None:
        self._store, self._taken, self._check = store, taken, check
        self._is_over = False

    def order_after(self) -> None:
        """Blocks until it was taken."""
        self._wait(self._check)

    def wait(self, deadline: float, give_up: Callable[[], None]) -> None:
        def check() -> None:
            self._check()
            give_up()
            if time.monotonic() > deadline:
                raise TimeoutError("an engine did not take a bucket")

        self._wait(check)

    def _wait(self, check: Callable[[], None]) -> None:
        while not self._is_over:
            if self._store.has(self._taken):
                self._store.shelf.delete_key(self._taken)
                self._is_over = True
            else:
                check()
                time.sleep(_POLL_S)


class NoWire:
    """The wire of a rank beside which there is no engine to be given anything."""

    def start(self, tensor: Tensor) -> "NoWire":
        return self

    def order_after(self) -> None:
        """Nobody reads the buffer."""

    def wait(self, deadline: float, give_up: Callable[[], None]) -> None:
        """Nobody reads the buffer."""


class Taker:
    """The engine's end of a lane."""

    def __init__(self, order: Order, device: torch.device) -> None:
        """Meets the trainer.

        Raises:
            DistError: rank 0 of it is gone.
        """
        self.store, self._lane = Store.connect(order.store, order.timeout_s), order.lane
        self._device = device
        self.plan = BucketPlan.from_json(self.store.read(PLAN))

    def bucket(self, index: int) -> Tensor:
        """[size] uint8; bucket `index` is there once it has arrived.

        Raises:
            RuntimeError, OSError: the trainer's rank is gone, or not on this GPU or node.
        """
        return self._buffers[index % len(self._buffers)][: self.plan.sizes[index]]

    def wait_for(self, index: int, order: Order, patience: Patience) -> None:
        """Blocks until bucket `index` is full."""
        full = _key("full", order.serial, self._lane, index)
        while not self.store.has(full):
            patience.check()
            time.sleep(_POLL_S)
        self.store.shelf.delete_key(full)

    def give_back(self, index: int, order: Order) -> None:
        """Says that nothing reads bucket `index` any more."""
        if self._buffers[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        self.store.put(_key("taken", order.serial, self._lane, index), "")

    def give_up(self, serial: str) -> None:
        """Ends the order for everybody: nobody waits for this rank, which takes nothing more."""
        with suppress(dist.DistError):  # the trainer is gone
            self.store.put(abort_key(serial), "")

    @cached_property
    def _buffers(self) -> list[Tensor]:
        addresses = json.loads(self.store.read(_buffers_key(self._lane)))
        return [attach(address, self._device) for address in addresses]


def _buffers_key(lane: int) -> str:
    return f"lane/{lane}"


def _key(what: Literal["full", "taken"], serial: str, lane: int, index: int) -> str:
    return f"{what}/{serial}/{lane}/{index}"
