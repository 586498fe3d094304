"""The address at which this node is reached, and sockets that listen there and nowhere else."""

import os
import socket

_ANYWHERE = "192.0.2.1"  # is nobody's: stands for all that is not on this node


def node_address() -> str:
    """An address of this node that the other nodes can reach; loopback where there is no other.

    Debian has nodes call themselves 127.0.1.1. A task of Slurm then takes the address by which it
    is reached from the node that started it.
    """
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        return _towards(_ANYWHERE) or "127.0.0.1"
    is_own = named.startswith("127.") and not launcher.startswith("127.")
    return (is_own and launcher and _towards(launcher)) or named


def _towards(other: str) -> str | None:
    """Asks the routing table for this node's address on the way to another; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None
