"""The address at which this node is reached, and sockets that listen there and nowhere else."""

import os
import socket

import psutil

_ANYWHERE = "192.0.2.1"  # is nobody's: stands for all that is not on this node


def node_address() -> str:
    """An address of this node that the other nodes can reach; loopback where there is no other.

    Debian has nodes call themselves 127.0.1.1. A task of Slurm then takes the address by which it
    is reached from the node that started it.
    """
    named = _named()
    if named is None:
        return _towards(_ANYWHERE) or "127.0.0.1"
    return _instead_of(named) or named


def settle_gloo() -> None:
    """Has gloo take that address, too, also in processes that are started from here.

    Left to itself it asks for the node's name, and of one that is 127.0.1.1 says so to the others.
    """
    if (named := _named()) and (address := _instead_of(named)):
        for interface, known in psutil.net_if_addrs().items():
            if address in [each.address for each in known]:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _named() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _instead_of(named: str) -> str | None:
    """Returns the address to take where the node's name is one that only the node itself reaches,
    and others can reach the one that started this task."""
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    if launcher.startswith("127.") or not named.startswith("127."):
        return None
    return _towards(launcher)


def _towards(other: str) -> str | None:
    """Asks the routing table for this node's address on the way to another; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None
