"""A process group beside the default one, from the trainer (rank 0) to its engines.

Trainer and engines live in worlds of their own, and each of those has a default group already.
SGLang joins such a group through `PrefixStore(name, TCPStore)`; doing exactly the same makes its
stock server, our embedded one and the trainer members of one communicator.
"""

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


def open_store(host: str, size: int, *, timeout_s: float) -> dist.TCPStore:
    """The store of rank 0 on a free port (`.port`), which the members connect to."""
    return dist.TCPStore(host, 0, size, True, timedelta(seconds=timeout_s), wait_for_workers=False)


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
            store: rank 0's own store, if it opened it with `open_store`.
            timeout_s: of joining and of every broadcast.
        """
        timeout = timedelta(seconds=timeout_s)
        self._store = store or dist.TCPStore(host, port, world_size, rank == 0, timeout)
        self.rank, self.size, self.name = rank, world_size, name
        self._group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            PrefixStore(name, self._store),
            group_name=name,  # type: ignore[arg-type]  # a NewType only newer torch has
            timeout=timeout,
        )
        _world.pg_group_ranks[self._group] = {i: i for i in range(world_size)}

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Sends (rank 0) or overwrites (others) `tensor`; contiguous, on the backend's device."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Leaves the group. Does not wait for the others, who may be dead."""
        for registry in (
            _world.pg_map,
            _world.pg_names,
            _world.pg_group_ranks,
            _world.pg_backend_config,
        ):
            registry.pop(self._group, None)
        self._group.abort()
        del self._group, self._store
