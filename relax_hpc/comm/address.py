"""The address at which this node is reached, and sockets that listen there and nowhere else."""

import os
import re
import socket
from collections.abc import Iterator

import psutil

_ANYWHERE = "192.0.2.1"  # is nobody's: stands for all that is not on this node
_NODES = re.compile(r"SLURM_JOB_NODELIST(_HET_GROUP_\d+)?$")


def node_address() -> str:
    """An address of this node that the other nodes can reach; loopback where there is no other.

    Debian has nodes call themselves 127.0.1.1. A task of Slurm then takes the address by which it
    is reached from the node that started it; on that node, the one towards the job's others.
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
    return _address_of(socket.gethostname())


def _address_of(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _instead_of(named: str) -> str | None:
    """Returns the address to take where the node's name is one that only the node itself reaches,
    and others can reach the one that started this task, or the job has other nodes."""
    if not named.startswith("127."):
        return None
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    if not launcher.startswith("127."):
        return _towards(launcher)
    # This is the node that starts the steps of the job: it reaches itself over loopback.
    return _towards_the_job() if _is_spread() else None


def _is_spread() -> bool:
    """Whether the job of Slurm has several nodes or components."""
    counts = (os.environ.get(each, "") for each in ("SLURM_HET_SIZE", "SLURM_JOB_NUM_NODES"))
    return any(each.isdecimal() and int(each) > 1 for each in counts)


def _towards_the_job() -> str | None:
    """Returns the address on the way to another node of the job; None if all of them are here."""
    lists = (text for name, text in os.environ.items() if _NODES.match(name))
    own = {os.environ.get("SLURMD_NODENAME"), socket.gethostname()}
    for node in dict.fromkeys(node for text in lists for node in some_nodes(text)):
        there = None if node in own else _address_of(node)
        if there and there.startswith("127."):  # virtual nodes of one machine
            return None
        if there and (address := _towards(there)):
            return address
    return _towards(_ANYWHERE)


def some_nodes(nodes: str) -> Iterator[str]:
    """Yields the first and the last node of each part of a list as Slurm writes it."""
    for part in re.findall(r"(?:[^,[]|\[[^]]*\])+", nodes):
        for place in (0, -1):
            ends = [re.split("[,-]", each)[place] for each in re.findall(r"\[([^]]*)\]", part)]
            yield re.sub(r"\[[^]]*\]", "{}", part).format(*ends)


def _towards(other: str) -> str | None:
    """Asks the routing table for this node's address on the way to another; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None
