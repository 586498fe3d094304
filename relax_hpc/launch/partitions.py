"""Partitions of the cluster: the nodes and GPUs that they have, the limits that they set and that
its srun sets, and what becomes of a job there that is preempted."""

import difflib
import re
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from relax_hpc.errors import ConfigError
from relax_hpc.launch import requeue
from relax_hpc.launch.jobs import output_of, words_of
from relax_hpc.launch.placement import Component

NO_LIMIT = sys.maxsize
"""Minutes of a time limit that is none."""

# Hidden partitions, too.
_SINFO = ("sinfo", "--all", "-h", "-N", "-o", "%P|%N|%G")
PARTITIONS = ("scontrol", "--all", "show", "partition", "--oneliner")


def minutes(limit: str) -> int:
    """Whole minutes of a Slurm time limit: "90", "90:00", "1:30:00", "1-2", "1-2:30:00";
    "UNLIMITED" is `NO_LIMIT`, and so is 0.

    Raises:
        ValueError: it is none of Slurm's spellings.
    """
    if limit.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return NO_LIMIT
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if match is None:
        raise ValueError(f"{limit!r} is not a Slurm time limit")
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is not None or match[4] is not None:  # [days-]hours[:minutes[:seconds]]
        found = days * 1440 + first * 60 + second + (third > 0)
    else:
        found = first + (second > 0)
    return found or NO_LIMIT


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
    answer = output_of(_SINFO)
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
    """A job over a limit of its partition would wait in the queue for ever; one with an MPI that
    srun does not know would wait, and then fail.

    Raises:
        ConfigError: none of a component's partitions takes it; names what the last one takes. Or
            srun has no such MPI.
    """
    _check_mpi(components)
    answer = output_of(PARTITIONS)
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


def _check_mpi(components: Sequence[Component]) -> None:
    asked = [each for each in components if each.bootstrap != "files"]
    answer = output_of(["srun", "--mpi=list"]) if asked else None
    if answer is None or answer.returncode:
        return
    known = parse_mpi(answer.stdout + answer.stderr)
    for component in asked:
        mpi = str(component.resources.mpi)
        if known and mpi not in known:
            close = difflib.get_close_matches(mpi, known, n=1)
            hint = f"did you mean {close[0]}? It has" if close else "use one of"
            raise ConfigError(
                f"{component.key}.mpi = {mpi!r}: is not known to srun; {hint} {', '.join(known)}"
            )


def parse_mpi(text: str) -> list[str]:
    """Reads `srun --mpi=list`: a plug-in in each line, and in the last one versions of pmix."""
    lines = [line.removeprefix("srun:").strip() for line in text.splitlines()]
    versions = [line.partition("available:")[2].replace(",", " ").split() for line in lines]
    return [line for line in lines if re.fullmatch(r"\w+", line)] + [
        name for names in versions for name in names
    ]


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
    if limited and minutes(str(asked.time)) > minutes(str(longest)):
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


class Preemption(NamedTuple):
    """The end of a job for the sake of another."""

    by: str
    """Who sets it: a partition, or a QOS."""
    mode: str
    """REQUEUE, CANCEL or SUSPEND."""
    grace_s: int
    """Seconds that it is given from then on (GraceTime)."""
    is_told: bool = True
    """Whether Slurm sends it our signal then; of TERM alone it cannot tell what is meant."""

    @property
    def notice_s(self) -> int:
        """Seconds from the announcement to the end; 0: it is not announced."""
        return self.grace_s * self.is_told

    @property
    def lack(self) -> str:
        """Tells in the cluster's words why nothing is announced."""
        said = f"GraceTime = {self.grace_s}"
        return said if self.is_told else f"{said}, without preempt_send_user_signal"


def check_preemption(
    components: Sequence[Component],
    *,
    save_every: int,
    save_s: float | None,
    whose: str = "this run",
    say: Callable[[str], None],
) -> None:
    """Says what a preemption, or the time limit, would cost the run.

    Args:
        components: in the order of the job.
        save_every: steps from one checkpoint to the next.
        save_s: seconds that the longest save of this run, or of one like it, took; None where
            there was none.
        whose: save that was, in words.
        say: is told once of each partition or QOS that preempts.

    Raises:
        ConfigError: the job asks for --requeue by name, and nobody would requeue it.
    """
    margin_s, ahead_s = requeue.MARGIN_S, requeue.SIGNAL_AHEAD_S
    config = _words("scontrol", "show", "config")
    asked = components[0].resources.sbatch
    if re.search(r"^JobRequeue\s*=\s*0\s*$", config, re.MULTILINE) and "--no-requeue" not in asked:
        say(
            "this cluster requeues only jobs that ask for it (JobRequeue = 0): the script does; "
            "where a rule of the site takes that back, resume the run"
        )
    if save_s is not None and save_s + margin_s > ahead_s:
        say(
            f"a save of {whose} took {save_s:.0f} s, and the time limit is announced {ahead_s} s "
            f"before: up to {save_every} steps are trained again after it; lower actor.save_every"
        )
    told: set[str] = set()
    for component in components:
        found = _preemption(component, config)
        if found is None or found.by in told:
            continue
        told.add(found.by)
        key = f"{component.key}: {found.by}"
        if found.mode == "SUSPEND":
            say(
                f"{key} suspends jobs that it preempts: all of this one stands still then, and "
                "time-outs go on"
            )
            continue
        ends = found.mode == "CANCEL" or "--no-requeue" in asked
        if ends and not found.notice_s and "--requeue" in asked:
            raise ConfigError(
                f"{components[0].key}.sbatch asks for --requeue: {found.by} cancels jobs that it "
                f"preempts at once (PreemptMode = CANCEL, {found.lack}), and nobody could requeue "
                "this one; use another partition, or remove --requeue"
            )
        say(f"{key} {_cost(found, ends, save_every, save_s, whose)}")


def _cost(found: Preemption, ends: bool, save_every: int, save_s: float | None, whose: str) -> str:
    """Returns in words the cost of a preemption."""
    again = "steps are trained again; lower actor.save_every"
    if not found.notice_s:
        then = "cancels jobs that it preempts, at once: resume it then" if ends else (
            "requeues jobs that it preempts, at once"
        )  # fmt: skip
        if found.grace_s:
            then = then.replace("at once", f"in effect at once ({found.lack})")
        return f"{then}; up to {save_every} {again}"
    said = f"announces a preemption {found.grace_s} s before (GraceTime)"
    if save_s is None:
        return f"{said}; how long a save takes is not known before the first"
    if save_s + requeue.MARGIN_S > found.grace_s:
        return f"{said}, and a save of {whose} took {save_s:.0f} s: up to {save_every} {again}"
    return f"{said}; a save of {whose} took {save_s:.0f} s"


def _preemption(component: Component, config: str) -> Preemption | None:
    """How a component's nodes would be taken from it; None if they would not, or nobody says."""
    kind = re.search(r"^PreemptType\s*=\s*preempt/(\w+)", config, re.MULTILINE)
    told = re.search(r"^\w+Parameters\s*=.*\b(preempt_)?send_user_signal\b", config, re.MULTILINE)
    found, resources = None, component.resources
    if kind and kind[1] == "qos" and resources.qos:
        rows = _words("sacctmgr", "-nP", "show", "qos", "format=Name,Preempt,PreemptMode,GraceTime")
        default = re.search(r"^PreemptMode\s*=\s*(\S+)", config, re.MULTILINE)
        found = preemption_by_qos(rows, resources.qos, default[1] if default else "OFF")
    if kind and kind[1] == "partition_prio":
        text = _words(*PARTITIONS)
        known = parse_sinfo(_words(*_SINFO))
        names = (resources.partition or known.default or "").split(",")
        found = preemption_by_partition(parse_limits(text), known, names)
    return found and found._replace(is_told=told is not None)


def preemption_by_partition(
    limits: dict[str, dict[str, str]], known: Partitions, names: Sequence[str]
) -> Preemption | None:
    """The first of some partitions whose jobs one of a higher tier preempts.

    Args:
        limits: see `parse_limits`.
        known: the nodes of each.
        names: that a component may get nodes from.
    """
    tiers = {name: int(each.get("PriorityTier", "1")) for name, each in limits.items()}
    for name in names:
        each, nodes = limits.get(name, {}), known.get(name, {}).keys()
        above = [
            other
            for other, tier in tiers.items()
            if tier > tiers.get(name, tier) and not nodes.isdisjoint(known.get(other, {}))
        ]
        mode = _mode(each.get("PreemptMode", "OFF"))
        if mode and above:
            return Preemption(f"partition {name}", mode, int(each.get("GraceTime", "0")))
    return None


def preemption_by_qos(text: str, name: str, default: str) -> Preemption | None:
    """How jobs of a QOS are preempted, of `sacctmgr -nP` with Name, Preempt, PreemptMode and
    GraceTime; `default` is the cluster's mode."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 3]
    if not any(name in preempts.split(",") for _, preempts, _, _ in rows):
        return None
    for other, _, said, grace in rows:
        mode = _mode(default if said.upper() in ("", "CLUSTER") else said)
        if other == name and mode:
            hours, minutes, seconds = ([0, 0, 0, *map(int, re.findall(r"\d+", grace))])[-3:]
            return Preemption(f"QOS {name}", mode, (hours * 60 + minutes) * 60 + seconds)
    return None


def _mode(said: str) -> str | None:
    """The mode among Slurm's words for one, which may be several; None where there is none."""
    words = said.upper().split(",")
    return next((mode for mode in ("REQUEUE", "CANCEL", "SUSPEND") if mode in words), None)


def _words(*command: str) -> str:
    answer = output_of(command)
    return "" if answer.returncode else answer.stdout
