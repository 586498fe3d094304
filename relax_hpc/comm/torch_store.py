"""Stores of torch.distributed, on the address they are for. They hold addresses and JSON of ours:
nobody authenticates there, so nothing in them is ever unpickled by us."""

import socket
from datetime import timedelta

import torch.distributed as dist

_BACKLOG = 4096


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
