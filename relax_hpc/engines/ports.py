"""Free ports, found by binding, and kept until the server that was given one listens there."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port(host: str) -> Iterator[int]:
    """A port of `host` that the kernel gives to nobody else for the length of the block.

    It is bound with SO_REUSEADDR and never listened on. So a server that sets the option as well
    (uvicorn and torch's store do) may listen there at once, and a search for a free port, by
    whomever, passes it over. Somebody who asks for that very number can still take it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])
