"""Finds the address at which other nodes reach this one, and holds a free port there."""

import ipaddress
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from relax_hpc.errors import ConfigError, PeerTimeoutError
from relax_hpc.runtime import process

_ANYWHERE = "192.0.2.1"  # is nobody's: stands for all that is not on this node
_NODES = re.compile(r"SLURM_JOB_NODELIST(_HET_GROUP_\d+)?$")
_NODE_ADDRESS = re.compile(r"NodeName=(\S+).*? NodeAddr=(\S+)")
_SCONTROL_S = 10
_REACH_S = 20.0
"""Longest time to open a connection to another node; a slower network is the wrong one."""
_KEY = "launch.advanced.network"
_REMEDY = f"set {_KEY} to an interface or a subnet that joins all nodes of the job"

_network: str | None = None


def settle(network: str | None) -> None:
    """Chooses the network by which this process, gloo and NCCL, and child processes reach other
    nodes.

    The environment overrides it. By default gloo resolves the node's name, which may lead to
    another network, or to loopback.

    Args:
        network: name of an interface or a subnet; None to find one.

    Raises:
        ConfigError: this node is not in it, or in none in which the job's other nodes reach it.
    """
    global _network
    _network = network
    address = node_address()
    interface = next((name for name, known in _own() if known == address), None)
    if interface and (network or address != _resolve_own()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface and network:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def node_address() -> str:
    """Returns an address of this node that other nodes can reach; loopback if there is no other.

    Order of preference: the network named by the job; the one named by the environment for gloo or
    NCCL; the way to Slurm's daemons or the job's other nodes; the address of the node's name (on
    Debian that is often 127.0.1.1).

    Raises:
        ConfigError: no address in that network, or none usable for a job over several nodes.
    """
    if _network:
        return _in_network(_KEY, _network)
    told = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if told and (_is_spread() or told in dict(_own())):
        return _in_network("GLOO_SOCKET_IFNAME", told)
    if address := _of_nccl() or _by_slurm():
        return address
    named = _resolve_own()
    if named and (named.startswith("127.") or named in [address for _, address in _own()]):
        return named
    return _towards(_ANYWHERE) or "127.0.0.1"


def listener(host: str, backlog: int) -> socket.socket:
    """Listens on a port of `host` (IPv4 or IPv6) that the kernel picks."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=backlog)


def with_port(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reach(host: str, port: int, who: str, whom: str, *, timeout_s: float) -> None:
    """Checks that a connection can be opened.

    Behind a firewall or in a wrong network, packets are dropped and the caller would wait in
    silence.

    Args:
        who: names this process in the error.
        whom: names the other one.
        timeout_s: limit; the check itself never takes more than `_REACH_S`.

    Raises:
        PeerTimeoutError: it cannot; names both ends.
    """
    limit_s = min(timeout_s, _REACH_S)
    deadline, pause = time.monotonic() + limit_s, 0.05
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(left, 0.1)).close()
        except OSError as error:
            if time.monotonic() + pause < deadline:
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
                continue
            own = _towards(host) or "no way there"
            raise PeerTimeoutError(
                f"{who} on node {_node()} ({own}) cannot reach {whom} at {with_port(host, port)} "
                f"within {limit_s:g} s: {error}; if it runs, {_REMEDY}"
            ) from error
        else:
            return


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _own() -> list[tuple[str, str]]:
    """Returns (interface, address) pairs of this node."""
    return [
        (name, each.address.partition("%")[0])
        for name, known in psutil.net_if_addrs().items()
        for each in known
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _in_network(key: str, network: str) -> str:
    own = [(name, address) for name, address in _own() if _is_global(address) or name == network]
    if "/" in network:
        subnet = ipaddress.ip_network(network, strict=False)
        found = [address for _, address in own if ipaddress.ip_address(address) in subnet]
    else:
        found = [address for name, address in own if name == network]
    if found:
        return min(found, key=lambda address: ":" in address)
    kind = "address in that subnet" if "/" in network else "interface of that name with an address"
    raise ConfigError(f"{key} = {network!r}: node {_node()} has no {kind}; it has {_interfaces()}")


def _interfaces() -> str:
    found = [f"{name} ({address})" for name, address in _own() if _is_global(address)]
    return ", ".join(found) or "loopback alone"


def _of_nccl() -> str | None:
    """Address of the first interface that matches NCCL_SOCKET_IFNAME, which holds prefixes."""
    for told in filter(None, os.environ.get("NCCL_SOCKET_IFNAME", "").split(",")):
        name = told.removeprefix("=")
        for own, address in _own():
            is_meant = own == name if told.startswith("=") else own.startswith(name)
            if is_meant and not told.startswith("^") and _is_global(address):
                return address
    return None


def _is_global(address: str) -> bool:
    """Whether an address is reachable from other nodes and distinct from their own."""
    known = ipaddress.ip_address(address)
    return not (known.is_loopback or known.is_link_local or known.is_unspecified)


def _resolve_own() -> str | None:
    return _address_of(socket.gethostname())


def _address_of(name: str) -> str | None:
    try:
        return name if ":" in name else socket.gethostbyname(name)
    except OSError:
        return None


def _by_slurm() -> str | None:
    """Returns the address on the way to Slurm's nodes; None if unknown, or if all nodes are this
    one."""
    if os.environ.get("SUBMITIT_EXECUTOR") == "local":  # a job of Slurm's around it is another one
        return None
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    with suppress(ValueError):
        if _is_global(launcher) and (address := _towards(launcher)):
            return address
    return _towards_the_job() if _is_spread() else None


def _is_spread() -> bool:
    counts = (os.environ.get(each, "") for each in ("SLURM_HET_SIZE", "SLURM_JOB_NUM_NODES"))
    return any(each.isdecimal() and int(each) > 1 for each in counts)


def _towards_the_job() -> str | None:
    """Returns the address on the way to another node of the job; None if all are this one."""
    lists = (text for name, text in os.environ.items() if _NODES.match(name))
    nodes = dict.fromkeys(node for text in lists for node in some_nodes(text))
    others = [node for node in nodes if node not in (_node(), socket.gethostname())]
    told = _ask_slurm(others)
    for node in others:
        there = _address_of(told.get(node, node)) or _address_of(node)
        if there and there.startswith("127."):  # virtual nodes of one machine
            return None
        if there and (address := _towards(there)):
            return address
    named = _resolve_own()
    if named and _is_global(named) and named in [address for _, address in _own()]:
        return named
    if address := _towards(_ANYWHERE):
        return address
    if not others:
        return None
    raise ConfigError(
        f"node {_node()} knows no address at which {others[0]} and the job's other nodes reach it: "
        f"it has {_interfaces()}; {_REMEDY}"
    )


def _ask_slurm(nodes: list[str]) -> dict[str, str]:
    """Resolves nodes with `scontrol`; empty if the command is missing."""
    command = ["scontrol", "show", "node", "--oneliner", ",".join(nodes)]
    try:
        said = process.run(command, _SCONTROL_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(_NODE_ADDRESS.findall(said))


def some_nodes(nodes: str) -> Iterator[str]:
    """Yields the first and the last node of each part of a Slurm node list."""
    for part in re.findall(r"(?:[^,[]|\[[^]]*\])+", nodes):
        for place in (0, -1):
            ends = [re.split("[,-]", each)[place] for each in re.findall(r"\[([^]]*)\]", part)]
            yield re.sub(r"\[[^]]*\]", "{}", part).format(*ends)


def _towards(other: str) -> str | None:
    """Asks the routing table for this node's address on the way to another; sends nothing."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))
            address = str(probe.getsockname()[0])
        except OSError:
            return None
    return address if _is_global(address) else None


@contextmanager
def hold_port(host: str) -> Iterator[int]:
    """Reserves a port of `host` for the length of the block.

    The socket is bound with SO_REUSEADDR and never listens. A server that sets the option too
    (uvicorn, torch's store) may listen there at once, while searches for a free port skip it. A
    process that asks for that very number can still take it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])
