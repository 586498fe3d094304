"""Sets up torch.distributed for one component, and the broadcast group of trainer and engines.

Neither stores nor groups of torch authenticate. So both carry only addresses and our JSON, and
nothing that comes from them is unpickled. gloo keeps listening while a group lives, and strangers
could use up the process's descriptors; `deaf_afterwards` blocks such sockets once all members are
connected.

Trainer (rank 0) and engines already have default groups of their own. SGLang joins a second group
through `PrefixStore(name, TCPStore)`; we do exactly the same, so stock and embedded servers fit.
"""

import ctypes
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
)

from relax_hpc.runtime import hardware
from relax_hpc.runtime.comm.address import listener, node_address, reach
from relax_hpc.runtime.comm.world import World

_BACKLOG = 4096


def start_store(world: World, *, timeout_s: float) -> dist.TCPStore:
    """Opens the ranks' store on a free port of rank 0's node and tells the others. Collective."""
    if world.rank == 0:
        store = open_store(node_address(), world.size, timeout_s=timeout_s)
        world.bcast((store.host, store.port))
        return store
    host, port = world.bcast(None)
    reach(host, port, f"rank {world.rank}", "the store of rank 0", timeout_s=timeout_s)
    return connect_store(host, port, world.size, timeout_s=timeout_s)


def open_store(host: str, size: int | None, *, timeout_s: float) -> dist.TCPStore:
    """Opens rank 0's store on a free port of `host` (`.port`)."""
    # Left to itself, the store listens on every address of the node.
    listening = listener(host, _BACKLOG)
    port = int(listening.getsockname()[1])
    return dist.TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def connect_store(host: str, port: int, size: int | None, *, timeout_s: float) -> dist.TCPStore:
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, size, False, timeout, wait_for_workers=False)


_ATTACH_FILTER = 26
_RETURN = 6
"""Classic BPF opcode: how many bytes of a packet are accepted."""


@contextmanager
def deaf_afterwards() -> Iterator[None]:
    """Blocks new connections to the sockets on which the block began to listen."""
    before = _listening()
    yield
    if os.environ.get("TORCH_GLOO_LAZY_INIT"):  # then members connect later
        return
    for name, number in _listening().items():
        if name not in before:
            _deafen(number)


def _listening() -> dict[str, int]:
    """Maps the listening sockets of this process to a descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed
            name = str(entry.readlink())
            if name.startswith("socket:") and _listens(int(entry.name)):
                found[name] = int(entry.name)
    return found


def _listens(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as same:
        return same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


def _deafen(number: int) -> None:
    """Drops every packet to a listening socket; established connections stay."""
    operation = ctypes.create_string_buffer(struct.pack("=HBBI", _RETURN, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(operation))
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as same:
        same.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def init_torch(world: World, *, device: Literal["cpu", "cuda"]) -> None:
    """Initialises the default process group and its timeout with the ranks of `world`.

    GPU ranks get NCCL for CUDA tensors and gloo for CPU tensors.
    """
    if device == "cuda":
        settle_nccl()
    timeout = timedelta(seconds=world.timeout_s)
    store = start_store(world, timeout_s=world.timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with deaf_afterwards():
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
        )


def settle_nccl() -> None:
    """Sets the NCCL variables on which trainer and engines must agree, before either uses NCCL.

    SGLang sets the same for itself. Without the first, a broadcast between a trainer and an engine
    fails in the engine ("invalid argument") and hangs in the trainer.
    """
    os.environ["NCCL_CUMEM_ENABLE"] = "0"
    os.environ["NCCL_NVLS_ENABLE"] = "0"


def own_device(local_rank: int, *, asked: int) -> torch.device:
    """Selects this rank's GPU; Slurm shows every task all GPUs of the component on its node.

    Args:
        local_rank: among the ranks of the node.
        asked: GPUs per node that the component requested.

    Raises:
        ConfigError: the component requested GPUs, and some are missing.
    """
    hardware.check_gpus(asked, torch.cuda.device_count(), f"torch {torch.__version__}")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


Group = dist.ProcessGroup | None
"""None is the default group."""


def all_gather_json(value: Any, group: Group = None) -> list[Any]:  # noqa: ANN401
    """Returns every rank's value, by rank of the group, in CPU tensors, which every group accepts.

    A value consists of dicts with text keys, lists, text, numbers and None; a tuple arrives as a
    list. Infinity and NaN survive.

    Raises:
        ValueError: a rank sent something that is not JSON.
    """
    mine, size = _encode(value), dist.get_world_size(group)
    if size == 1:
        return [_decode(mine)]
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = mine.new_zeros(longest)
    padded[: len(mine)] = mine
    texts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(texts, padded, group=group)
    return [_decode(text[: int(end)]) for text, end in zip(texts, lengths, strict=True)]


def broadcast_json(value: Any, source: int, group: Group = None) -> Any:  # noqa: ANN401
    """Returns the value of rank `source` of the group; ignores the other ranks' argument.

    Raises:
        ValueError: the source sent something that is not JSON.
    """
    is_source = dist.get_rank(group) == source
    text = _encode(value) if is_source else torch.empty(0, dtype=torch.uint8)
    if dist.get_world_size(group) == 1:
        return _decode(text)
    length = torch.tensor([len(text)])
    dist.broadcast(length, group=group, group_src=source)
    if not is_source:
        text = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(text, group=group, group_src=source)
    return _decode(text)


def _encode(value: Any) -> Tensor:  # noqa: ANN401
    """Returns [bytes] uint8."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: Tensor) -> Any:  # noqa: ANN401
    return json.loads(text.numpy().tobytes())


GroupBackend = Literal["gloo", "nccl"]
_POLL_S = 1e-4
_UNWATCHED = "TORCH_NCCL_BLOCKING_WAIT"


class Transfer:
    def __init__(self, work: dist.Work, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def order_after(self) -> None:
        """Orders later work of the current stream after it; on CPU, waits for it."""
        if self._tensor.is_cuda:
            self._work.synchronize()  # the stream alone, also in a group without a watchdog
        else:
            self._work.wait()

    def wait(self, deadline: float, give_up: Callable[[], None] = lambda: None) -> None:
        """Blocks until it is over.

        Args:
            deadline: of time.monotonic().
            give_up: called repeatedly meanwhile; an error that it raises ends the wait.

        Raises:
            TimeoutError: a rank is dead or hangs.
            RuntimeError: a rank has left.
        """
        while not self._work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError("a broadcast did not end")
            give_up()
            time.sleep(_POLL_S)
        self._work.wait()  # raises what went wrong


class Shelf:
    """Texts that ranks of the trainer and of engines leave for each other in a store."""

    def __init__(self, store: dist.Store) -> None:
        self.raw = store

    def put(self, key: str, text: str) -> None:
        self.raw.set(key, text)

    def has(self, key: str) -> bool:
        return bool(self.raw.check([key]))

    def read(self, key: str) -> str:
        """Returns a text without removing it."""
        return self.raw.get(key).decode()

    def take(self, key: str, *, timeout_s: float) -> str:
        """Waits for a text and removes it.

        Raises:
            DistError: no text within `timeout_s`.
        """
        self.raw.wait([key], timedelta(seconds=timeout_s))
        text = self.read(key)
        self.raw.delete_key(key)
        return text


class BroadcastGroup(Shelf):
    """A communicator in which rank 0 sends and everybody else receives."""

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        name: str,
        backend: GroupBackend,
        *,
        store: dist.TCPStore | None = None,
        timeout_s: float = 300,
    ) -> None:
        """Blocks until all ranks have joined.

        Args:
            host: address of rank 0's store.
            rank: 0 for the trainer.
            world_size: trainer and all ranks of all engines.
            name: equal on all ranks, never used twice with one store.
            backend: gloo for CPU tensors, nccl for CUDA tensors.
            store: rank 0's own store, from `open_store`.
            timeout_s: of joining and of every broadcast.
        """
        timeout, self._timeout_s = timedelta(seconds=timeout_s), timeout_s
        if store is None:
            reach(host, port, "an engine", "the trainer", timeout_s=timeout_s)
        self._store = store or dist.TCPStore(host, port, world_size, False, timeout)
        self.rank, self.size, self.name, self.backend = rank, world_size, name, backend
        with _disable_watchdog() if backend == "nccl" else deaf_afterwards():
            self._group, _ = _new_process_group_helper(
                world_size,
                rank,
                [],
                Backend(backend),
                PrefixStore(name, self._store),
                group_name=name,  # type: ignore[arg-type]  # a NewType only newer torch has
                timeout=timeout,
            )
        super().__init__(_world.pg_map[self._group][1])
        _world.pg_group_ranks[self._group] = {i: i for i in range(world_size)}

    def broadcast(self, tensor: Tensor, give_up: Callable[[], None] = lambda: None) -> None:
        """Sends (rank 0) or overwrites (others) `tensor`; contiguous, on the backend's device.

        Args:
            tensor: the same size everywhere.
            give_up: called repeatedly meanwhile; an error that it raises ends the wait, and the
                group.

        Raises:
            TimeoutError: it did not end within the group's timeout.
            RuntimeError: a rank has left.
        """
        transfer = self.start(tensor)
        try:
            transfer.wait(time.monotonic() + self._timeout_s, give_up)
        except BaseException:
            self._group.abort()  # else what it waits for would keep it alive
            raise
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()

    def start(self, tensor: Tensor) -> Transfer:
        """Begins to send (rank 0) or overwrite (others) `tensor`, after the current stream's queued
        work."""
        return start_broadcast(self._group, tensor)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the host can work on until a broadcast has ended."""
        return self.backend == "nccl"

    def close(self) -> None:
        """Leaves the group without waiting for the others, who may be dead."""
        for registry in (
            _world.pg_map,
            _world.pg_names,
            _world.pg_group_ranks,
            _world.pg_backend_config,
            _world.pg_to_tag,
        ):
            registry.pop(self._group, None)
        # A group that is held anywhere keeps its connections, and peers that wait for bytes of a
        # broadcast that was given up wait on.
        for tagged in _world.tags_to_pg.values():
            while self._group in tagged:
                tagged.remove(self._group)
        self._group.abort()
        del self._group, self._store, self.raw


@contextmanager
def _disable_watchdog() -> Iterator[None]:
    """Makes NCCL groups without a watchdog.

    torch's watchdog and the default group's monitor end the process 60 s after a late broadcast or
    a lost peer. Here a peer may leave; we abort the group instead.
    """
    before = os.environ.get(_UNWATCHED)
    os.environ[_UNWATCHED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_UNWATCHED]
        else:
            os.environ[_UNWATCHED] = before


def start_broadcast(group: dist.ProcessGroup, tensor: Tensor) -> Transfer:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return Transfer(group.broadcast([tensor], options), tensor)
