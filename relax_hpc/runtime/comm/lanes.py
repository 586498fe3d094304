"""Hands weights from a trainer rank to the engine ranks on the same GPU through shared memory.

A lane leads to one engine rank; those of a trainer rank are the same few buffers, which all map.
The trainer announces a full buffer on each lane, and refills it only after every engine has taken
it. Messages go through rank 0's store. The memory has no file; it is freed with the process that
made it, once nobody maps it.
"""

import itertools
import json
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from relax_hpc.runtime.comm.address import with_port
from relax_hpc.runtime.comm.bucket import BucketPlan
from relax_hpc.runtime.comm.orders import PLAN, Order, Patience, abort_key
from relax_hpc.runtime.comm.torch_group import Shelf, connect_store

_HANDLE = 7
"""Number of arguments of torch's `rebuild_cuda_tensor` after type, shape and device."""
_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class SharedMemory(NamedTuple):
    """[n] uint8 and the address by which others map it."""

    tensor: Tensor
    address: str
    """Text from which `attach` maps it, in a process of the same user."""


def allocate(num_bytes: int, device: torch.device) -> SharedMemory:
    """Makes memory that can be mapped; it lives as long as this process uses the tensor."""
    if device.type != "cuda":
        file = os.memfd_create("relax-weights")
        os.truncate(file, num_bytes)
        tensor = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
        address = {"path": f"/proc/{os.getpid()}/fd/{file}", "size": num_bytes}
        return SharedMemory(tensor, json.dumps(address))
    # Memory of segments that grow could only be passed on by a call that containers refuse.
    with _fix_segments():
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    _, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    handle = _to_texts(arguments[_HANDLE:])
    return SharedMemory(tensor, json.dumps({"cuda": handle, "size": num_bytes}))


def attach(address: str, device: torch.device) -> Tensor:
    """Maps memory from `allocate` of another process.

    Args:
        address: `SharedMemory.address`.
        device: this process's name for the GPU that holds the memory.

    Raises:
        RuntimeError: CUDA cannot map it.
        OSError: the process that made it is gone, or is another user's.
    """
    found = json.loads(address)
    if "path" in found:
        file = os.open(found["path"], os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(file, found["size"]), dtype=torch.uint8)
        finally:
            os.close(file)
    index = torch.cuda.current_device() if device.index is None else device.index
    size = torch.Size([found["size"]])
    # What torch gives away is good in its process only by the device's number there.
    tensor: Tensor = reductions.rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        Tensor,
        size,
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        index,
        *_from_texts(found["cuda"]),
    )
    return tensor


def _to_texts(handle: Iterable[Any]) -> list[Any]:
    return [value.hex() if isinstance(value, bytes) else value for value in handle]


def _from_texts(texts: Iterable[Any]) -> list[Any]:
    return [bytes.fromhex(value) if isinstance(value, str) else value for value in texts]


@contextmanager
def _fix_segments() -> Iterator[None]:
    """Makes torch allocate by cudaMalloc inside: expandable segments cannot be shared."""
    own = next((os.environ[name] for name in _SETTINGS if os.environ.get(name)), "")
    if "expandable_segments" not in own:
        yield
        return
    options = [option for option in own.split(",") if "expandable_segments" not in option]
    _set_allocator(",".join([*options, "expandable_segments:False"]))
    try:
        yield
    finally:
        _set_allocator(own)


def _set_allocator(settings: str) -> None:
    """Calls the setter by the name that this version of torch has for it."""
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(settings)


_POLL_S = 1e-4


class Store(Shelf):
    """The shelf of a trainer whose ranks serve the engines beside them."""

    def __init__(self, store: dist.TCPStore) -> None:
        super().__init__(store)
        self.address = with_port(store.host, store.port)

    @classmethod
    def connect(cls, address: str, timeout_s: float) -> "Store":
        """Connects an engine to the store whose address an order named.

        Raises:
            DistError: it is not there.
        """
        host, port = address.removeprefix("[").replace("]", "").rsplit(":", 1)
        return cls(connect_store(host, int(port), None, timeout_s=timeout_s))


class LaneSender:
    """The end of its lanes at a trainer rank; implements `bucket.Wire`."""

    def __init__(self, store: Store, lanes: Sequence[int], buffers: Sequence[SharedMemory]) -> None:
        self._store, self._lanes = store, lanes
        for lane in lanes:
            store.put(_buffers_key(lane), json.dumps([each.address for each in buffers]))
        self._serial = ""
        self._check: Callable[[], None] = lambda: None
        self._count = itertools.count()

    def begin(self, serial: str, lanes: Sequence[int], check: Callable[[], None]) -> None:
        """Counts the buckets from here on for the order `serial`.

        Args:
            lanes: those with an engine in it; without any, buckets go to nobody.
            check: called while it waits for the engines; an error that it raises ends the wait.
        """
        self._serial, self._check, self._count = serial, check, itertools.count()
        self._lanes = lanes

    def start(self, tensor: Tensor) -> "_Handover":
        """Announces the next bucket."""
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()
        index = next(self._count)
        for lane in self._lanes:
            self._store.put(_key("full", self._serial, lane, index), "")
        taken = [_key("taken", self._serial, lane, index) for lane in self._lanes]
        return _Handover(self._store, taken, self._check)


class _Handover:
    def __init__(self, store: Store, taken: list[str], check: Callable[[], None]) -> None:
        self._store, self._missing, self._check = store, taken, check

    def order_after(self) -> None:
        """Blocks until every engine has taken it."""
        self._wait(self._check)

    def wait(self, deadline: float, give_up: Callable[[], None]) -> None:
        def check() -> None:
            self._check()
            give_up()
            if time.monotonic() > deadline:
                raise TimeoutError("an engine did not take a bucket")

        self._wait(check)

    def _wait(self, check: Callable[[], None]) -> None:
        while self._missing:
            if self._store.has(self._missing[-1]):
                self._store.raw.delete_key(self._missing.pop())
            else:
                check()
                time.sleep(_POLL_S)


class Taker:
    def __init__(self, order: Order, device: torch.device) -> None:
        """Meets the trainer.

        Raises:
            DistError: its rank 0 is gone.
        """
        self.store, self._lane = Store.connect(order.store, order.timeout_s), order.lane
        self._device = device
        self.plan = BucketPlan.from_json(self.store.read(PLAN))

    def bucket(self, index: int) -> Tensor:
        """Returns [size] uint8; bucket `index` is there once it has arrived.

        Raises:
            RuntimeError, OSError: the trainer's rank is gone, or not on this GPU or node.
        """
        return self._buffers[index % len(self._buffers)][: self.plan.sizes[index]]

    def wait_for(self, index: int, order: Order, patience: Patience) -> None:
        full = _key("full", order.serial, self._lane, index)
        while not self.store.has(full):
            patience.check()
            time.sleep(_POLL_S)
        self.store.raw.delete_key(full)

    def give_back(self, index: int, order: Order) -> None:
        """Reports that this rank no longer reads bucket `index`."""
        if self._buffers[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        self.store.put(_key("taken", order.serial, self._lane, index), "")

    def give_up(self, serial: str) -> None:
        """Ends the order for everybody: this rank takes nothing more."""
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
