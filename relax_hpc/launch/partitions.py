"""Partitions of the cluster: the nodes and GPUs that they have, and the limits that they set."""

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

from relax_hpc.errors import ConfigError
from relax_hpc.launch import script
from relax_hpc.launch.jobs import output_of, words_of
from relax_hpc.launch.placement import Component


class Partitions(dict[str, dict[str, int]]):
    """Partition -> node -> its GPUs; `default` is where a job goes that names none."""

    default: str | None = None


def check_partitions(components: Sequence[Component], partitions: Partitions) -> None:
    """The partitions exist and have the nodes and GPUs asked for, though maybe not free now."""
    wanted: dict[str, int] = {}
    for component in components:
        name = component.resources.partition or partitions.default
        if name is None:
            continue  # sbatch will say what it takes instead
        nodes = _nodes(component, name, partitions)
        gpus = component.resources.gpus_per_node
        key = component.key
        fit = sum(have >= gpus for have in nodes.values())
        if fit < min(component.held_nodes, len(nodes)):
            most = max(nodes.values(), default=0)
            raise ConfigError(
                f"{key}.gpus_per_node = {gpus}: {fit} nodes of partition {name} have as many, "
                f"{component.held_nodes} are needed; its nodes have up to {most}"
            )
        wanted[name] = wanted.get(name, 0) + component.held_nodes
        if wanted[name] > len(nodes):
            asked = "nodes" if component.held_nodes == component.nodes else "max_nodes"
            raise ConfigError(
                f"{key}.{asked} = {component.held_nodes}: partition {name} has {len(nodes)} nodes "
                f"and the run needs {wanted[name]}, since components do not share a node; "
                "ask for fewer"
            )


def _nodes(component: Component, names: str, partitions: Partitions) -> dict[str, int]:
    nodes: dict[str, int] = {}
    for name in names.split(","):
        if name not in partitions:
            close = difflib.get_close_matches(name, partitions, n=1)
            hint = f"did you mean {close[0]}?" if close else f"use {', '.join(partitions)}"
            raise ConfigError(f"{component.key}.partition = {name!r}: no such partition; {hint}")
        nodes |= partitions[name]
    return nodes


def partitions() -> Partitions:
    """The partitions of the cluster.

    Raises:
        ConfigError: Slurm does not answer.
    """
    answer = output_of(["sinfo", "-h", "-N", "-o", "%P|%N|%G"])
    if answer.returncode:
        raise ConfigError(
            f"{words_of(answer)}; work where Slurm answers; with --local nobody asks it, and "
            "submit runs the job on this machine"
        )
    return parse_sinfo(answer.stdout)


def parse_sinfo(text: str) -> Partitions:
    """Reads lines of `sinfo -N -o "%P|%N|%G"`: "main*|n1|gpu:h100:4(S:0-1),nvme:1"."""
    partitions = Partitions()
    for line in text.splitlines():
        name, node, gres = line.split("|")
        if name.endswith("*"):
            name = partitions.default = name[:-1]
        partitions.setdefault(name, {})[node] = _gpus(gres)
    return partitions


def _gpus(gres: str) -> int:
    count = 0
    # Strip "(S:0-1)" first: it may hold commas.
    plain = "".join(part.split(")")[-1] for part in gres.split("("))
    for resource in plain.split(","):
        name, *rest = resource.split(":")
        if name == "gpu" and rest:
            count += int(rest[-1])
    return count


class Limit(NamedTuple):
    """The value of a job's key that a partition refuses, and what it takes."""

    key: str
    value: object
    takes: str


def check_limits(components: Sequence[Component]) -> None:
    """A job over a limit of its partition would wait in the queue for ever.

    Raises:
        ConfigError: none of a component's partitions takes it; names what the last one takes.
    """
    answer = output_of(["scontrol", "show", "partition", "--oneliner"])
    if answer.returncode:
        return  # those that sinfo lists are there; sbatch will say the rest
    limits = parse_limits(answer.stdout)
    lifted = _lifted_by_qos()
    for component in components:
        names = (component.resources.partition or "").split(",")
        known = [name for name in limits if name in names] or [
            name for name, each in limits.items() if each.get("Default") == "YES" and names == [""]
        ]
        flags = lifted.get(component.resources.qos or "", "")
        found = [over_limit(component, limits[name], flags) for name in known]
        if found and all(found):
            limit = found[-1]
            assert limit is not None
            raise ConfigError(
                f"{component.key}.{limit.key} = {limit.value!r}: partition {known[-1]} "
                f"{limit.takes}"
            )


def parse_limits(text: str) -> dict[str, dict[str, str]]:
    """Reads `scontrol show partition --oneliner`: partition -> the limits that are set."""
    found = {}
    for line in text.splitlines():
        pairs = dict(re.findall(r"(\w+)=(\S*)", line))
        if name := pairs.get("PartitionName"):
            unset = ("ALL", "NONE", "UNLIMITED", "(null)", "N/A", "")
            found[name] = {key: value for key, value in pairs.items() if value not in unset}
    return found


def over_limit(component: Component, limits: dict[str, str], flags: str = "") -> Limit | None:
    """The first request that a partition refuses.

    Args:
        component: with its requests.
        limits: of the partition.
        flags: of the job's QOS, of which some lift limits.
    """
    asked, nodes = component.resources, component.held_nodes
    nodes_key = "max_nodes" if asked.max_nodes else "nodes"
    longest = limits.get("MaxTime")
    limited = asked.time and longest and "PartitionTimeLimit" not in flags
    if limited and script.minutes(str(asked.time)) > script.minutes(str(longest)):
        return Limit("time", asked.time, f"lets jobs run for {longest}; ask for less")
    most, least = limits.get("MaxNodes"), limits.get("MinNodes", "0")
    if most and nodes > int(most) and "PartitionMaxNodes" not in flags:
        return Limit(nodes_key, nodes, f"gives a component {most} nodes at most; ask for fewer")
    if nodes < int(least) and "PartitionMinNodes" not in flags:
        return Limit(nodes_key, nodes, f"takes {least} nodes or more; use another partition")
    for key, whose, value in (
        ("account", "Accounts", asked.account),
        ("qos", "Qos", asked.qos),
    ):
        allowed, denied = limits.get(f"Allow{whose}"), limits.get(f"Deny{whose}", "")
        if value and allowed and value not in allowed.split(","):
            return Limit(key, value, f"takes {allowed.replace(',', ', ')} only")
        if value and value in denied.split(","):
            return Limit(key, value, f"does not take {denied.replace(',', ', ')}")
    return None


def _lifted_by_qos() -> dict[str, str]:
    """QOS -> its flags; nothing where there is no accounting."""
    answer = output_of(["sacctmgr", "-nP", "show", "qos", "format=Name,Flags"])
    lines = answer.stdout.splitlines() if not answer.returncode else []
    return {name: flags for name, _, flags in (line.partition("|") for line in lines)}
