"""Stores of torch.distributed, on the address they are for. They hold addresses and JSON of ours:
nobody authenticates there, so nothing in them is ever unpickled by us."""

import socket
from datetime import timedelta

import torch.distributed as dist

from relax_hpc.comm.address import node_address
from relax_hpc.comm.world import World

_BACKLOG = 4096


def shared_store(world: World, *, timeout_s: float) -> dist.TCPStore:
    """The ranks' store, on a free port of rank 0's node, which tells the others. Collective.

    Nobody guesses a port, so nobody can lose a race for one.
    """
    if world.rank == 0:
        store = open_store(node_address(), world.size, timeout_s=timeout_s)
        world.bcast((store.host, store.port))
        return store
    host, port = world.bcast(None)
    return connect_store(host, port, world.size, timeout_s=timeout_s)


def open_store(host: str, size: int | None, *, timeout_s: float) -> dist.TCPStore:
    """The store of rank 0 on a free port of `host` (`.port`), which the members connect to."""
    # Left to itself, the store listens on every address of the node.
    listener = socket.create_server((host, 0), backlog=_BACKLOG)
    port = int(listener.getsockname()[1])
    return dist.TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(host: str, port: int, size: int | None, *, timeout_s: float) -> dist.TCPStore:
    """Raises DistError if it is not there."""
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, size, False, timeout, wait_for_workers=False)
