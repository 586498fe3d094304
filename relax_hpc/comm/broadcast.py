"""A process group beside the default one, from the trainer (rank 0) to its engines.

Trainer and engines live in worlds of their own, and each of those has a default group already.
SGLang joins such a group through `PrefixStore(name, TCPStore)`; doing exactly the same makes its
stock server, our embedded one and the trainer members of one communicator.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
)

Transport = Literal["gloo", "nccl"]
_POLL_S = 1e-4
_UNWATCHED = "TORCH_NCCL_BLOCKING_WAIT"


class Transfer:
    """A broadcast under way."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def order_after(self) -> None:
        """Makes what the current stream does next happen after it; on CPU, waits for it."""
        if self._tensor.is_cuda:
            self._work.synchronize()  # the stream alone, also in a group without a watchdog
        else:
            self._work.wait()

    def wait(self, deadline: float, give_up: Callable[[], None] = lambda: None) -> None:
        """Blocks until it is over.

        Args:
            deadline: of time.monotonic().
            give_up: called again and again meanwhile; what it raises ends the wait.

        Raises:
            TimeoutError: it is not over; a rank is dead or hangs.
            RuntimeError: a rank has left.
        """
        while not self._work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError("a broadcast did not end")
            give_up()
            time.sleep(_POLL_S)
        self._work.wait()  # raises what went wrong


class BroadcastGroup:
    """One communicator; rank 0 sends, everybody else receives."""

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        name: str,
        backend: Transport,
        *,
        store: dist.TCPStore | None = None,
        timeout_s: float = 300,
    ) -> None:
        """Blocks until all ranks have joined.

        Args:
            host: address of the store of rank 0.
            port: its port.
            rank: 0 for the trainer.
            world_size: trainer and all ranks of all engines.
            name: equal on all ranks, never used twice with one store.
            backend: gloo for CPU tensors, nccl for CUDA tensors.
            store: rank 0's own store, which it opened with `open_store`.
            timeout_s: of joining and of every broadcast.
        """
        timeout, self._timeout_s = timedelta(seconds=timeout_s), timeout_s
        self._store = store or dist.TCPStore(host, port, world_size, False, timeout)
        self.rank, self.size, self.name, self.backend = rank, world_size, name, backend
        with _unwatched() if backend == "nccl" else nullcontext():
            self._group, _ = _new_process_group_helper(
                world_size,
                rank,
                [],
                Backend(backend),
                PrefixStore(name, self._store),
                group_name=name,  # type: ignore[arg-type]  # a NewType only newer torch has
                timeout=timeout,
            )
        self._shelf: dist.Store = _world.pg_map[self._group][1]
        _world.pg_group_ranks[self._group] = {i: i for i in range(world_size)}

    def broadcast(self, tensor: torch.Tensor, give_up: Callable[[], None] = lambda: None) -> None:
        """Sends (rank 0) or overwrites (others) `tensor`; contiguous, on the backend's device.

        Args:
            tensor: the same size everywhere.
            give_up: called again and again meanwhile; what it raises ends the wait, and the group.

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

    def start(self, tensor: torch.Tensor) -> Transfer:
        """Begins to send (rank 0) or to overwrite (others) `tensor`, after what the current stream
        has been given so far."""
        return start_broadcast(self._group, tensor)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the host can do something else until a broadcast has ended."""
        return self.backend == "nccl"

    def put(self, key: str, text: str) -> None:
        """Leaves a text for the other ranks."""
        self._shelf.set(key, text)

    def take(self, key: str, *, timeout_s: float) -> str:
        """A text that another rank leaves.

        Raises:
            DistError: nobody left it within `timeout_s`.
        """
        self._shelf.wait([key], timedelta(seconds=timeout_s))
        text = self._shelf.get(key).decode()
        self._shelf.delete_key(key)
        return text

    def close(self) -> None:
        """Leaves the group. Does not wait for the others, who may be dead."""
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
        del self._group, self._store, self._shelf


@contextmanager
def _unwatched() -> Iterator[None]:
    """A group of NCCL that is made in it has no watchdog.

    Torch's ends the process 60 s after a broadcast was late or a peer was lost, and so does the
    monitor of the default group, which it alarms. Here a peer may go; the group is aborted then.
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


def start_broadcast(group: dist.ProcessGroup, tensor: torch.Tensor) -> Transfer:
    """Begins a broadcast of `tensor` from rank 0 of `group`."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return Transfer(group.broadcast([tensor], options), tensor)
