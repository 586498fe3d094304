"""Asks a Slurm cluster about itself: partitions, limits, preemption, and whether it takes a job."""

import getpass
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from subprocess import CompletedProcess
from typing import NamedTuple

from relax_hpc.errors import ConfigError, nearest
from relax_hpc.launch import requeue, script
from relax_hpc.launch.placement import Component
from relax_hpc.launch.slurm import sbatch
from relax_hpc.launch.states import is_silent, output_of, words_of
from relax_hpc.roles.role import Say
from relax_hpc.sections import Resources

NO_LIMIT = sys.maxsize
"""Minutes of an unlimited job."""

# Hidden partitions, too.
_SINFO = ("sinfo", "--all", "-h", "-N", "-o", "%P|%N|%G")
_PARTITIONS = ("scontrol", "--all", "show", "partition", "--oneliner")
_TRIAL_S = 120
_CAUSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Invalid account", ("account",)),
    (
        "policy|Limit|QOS",
        ("account", "qos", "time", "nodes", "gpus_per_node", "cpus_per_task", "mem"),
    ),
    ("qos specification", ("qos",)),
    ("feature", ("constraint",)),
    ("reservation", ("reservation",)),
    ("node name", ("exclude",)),
    ("[Pp]artition", ("partition",)),
    ("license", ("sbatch",)),
    ("option|Invalid --", ("sbatch",)),
    ("dependency", ()),
    ("time limit", ("time",)),
    (
        "",
        ("nodes", "gpus_per_node", "gpu_type", "cpus_per_task", "mem", "constraint", "exclude"),
    ),
)
"""Words of sbatch -> fields of resources that may be the cause."""


class Partitions(dict[str, dict[str, int]]):
    """Partition -> node -> its GPUs; `default` is Slurm's default partition."""

    default: str | None = None


class Qos(NamedTuple):
    """A quality of service, as `sacctmgr` prints it."""

    name: str
    flags: str = ""
    preempts: str = ""
    """Names of others, with commas."""
    mode: str = ""
    """How it is preempted itself."""
    grace: str = ""
    jobs_of_user: str = ""
    """Most that may run at a time."""
    jobs_of_account: str = ""
    jobs_of_all: str = ""


class Cluster:
    """Answers of a cluster's commands; each runs once, when it is needed first. Without an answer
    all but `nodes` are empty."""

    @cached_property
    def nodes(self) -> Partitions:
        """Raises:
        ConfigError: Slurm does not answer.
        """
        answer = output_of(_SINFO)
        if answer.returncode:
            raise ConfigError(
                f"{words_of(answer)}; work where Slurm answers; with --local nobody asks it, and "
                "submit runs the job on this machine"
            )
        return parse_sinfo(answer.stdout)

    @cached_property
    def limits(self) -> dict[str, dict[str, str]]:
        """Partition -> the limits that are set."""
        return parse_limits(_words(*_PARTITIONS))

    @cached_property
    def config(self) -> dict[str, str]:
        """Settings of slurm.conf."""
        said = _words("scontrol", "show", "config")
        return dict(re.findall(r"^(\w+)\s*= (.*?) *$", said, re.MULTILINE))

    @cached_property
    def qos(self) -> dict[str, Qos]:
        """Empty without accounting."""
        fields = "Name,Flags,Preempt,PreemptMode,GraceTime,MaxJobsPU,MaxJobsPA,GrpJobs"
        rows = (row for row in _rows("qos", f"format={fields}") if len(row) == 8)
        return {row[0]: Qos(*row) for row in rows}

    @cached_property
    def mpi(self) -> list[str]:
        """MPI types that srun knows."""
        answer = output_of(["srun", "--mpi=list"])
        return [] if answer.returncode else parse_mpi(answer.stdout + answer.stderr)


def minutes(limit: str) -> int:
    """Parses a Slurm time limit to whole minutes: "90", "90:00", "1:30:00", "1-2", "1-2:30:00";
    "UNLIMITED" and 0 are `NO_LIMIT`.

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


def parse_sinfo(text: str) -> Partitions:
    """Parses `sinfo -N -o "%P|%N|%G"`: "main*|n1|gpu:h100:4(S:0-1),nvme:1"."""
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


def parse_mpi(text: str) -> list[str]:
    """Parses `srun --mpi=list`: a plugin per line, the last one with versions of pmix."""
    lines = [line.removeprefix("srun:").strip() for line in text.splitlines()]
    versions = [line.partition("available:")[2].replace(",", " ").split() for line in lines]
    return [line for line in lines if re.fullmatch(r"\w+", line)] + [
        name for names in versions for name in names
    ]


def parse_limits(text: str) -> dict[str, dict[str, str]]:
    """Parses `scontrol show partition --oneliner`: partition -> the limits that are set."""
    found = {}
    for line in text.splitlines():
        pairs = dict(re.findall(r"(\w+)=(\S*)", line))
        if name := pairs.get("PartitionName"):
            unset = ("ALL", "NONE", "UNLIMITED", "(null)", "N/A", "")
            found[name] = {key: value for key, value in pairs.items() if value not in unset}
    return found


def check_partitions(components: Sequence[Component], partitions: Partitions) -> None:
    """Checks that the partitions exist and have the requested nodes and GPUs, free or not."""
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
            hint = nearest(name, partitions) or f"use {', '.join(partitions)}"
            raise ConfigError(f"{component.key}.partition = {name!r}: no such partition; {hint}")
        nodes |= partitions[name]
    return nodes


class Limit(NamedTuple):
    """A value in the job that a partition refuses, and the limit."""

    key: str
    value: object
    takes: str


def check_limits(components: Sequence[Component], cluster: Cluster) -> None:
    """Refuses a job over its partition's limits, which would pend for ever, or with an MPI that
    srun does not know, which would fail later.

    Raises:
        ConfigError: none of a component's partitions accepts it; names the last one's limit. Or
            srun has no such MPI.
    """
    _check_mpi(components, cluster)
    limits = cluster.limits  # without an answer those that sinfo lists are there
    for component in components:
        names = (component.resources.partition or "").split(",")
        known = [name for name in limits if name in names] or [
            name for name, each in limits.items() if each.get("Default") == "YES" and names == [""]
        ]
        name = component.resources.qos
        flags = cluster.qos[name].flags if name and name in cluster.qos else ""
        found = [over_limit(component, limits[name], flags) for name in known]
        if found and all(found):
            limit = found[-1]
            assert limit is not None
            raise ConfigError(
                f"{component.key}.{limit.key} = {limit.value!r}: partition {known[-1]} "
                f"{limit.takes}"
            )


def _check_mpi(components: Sequence[Component], cluster: Cluster) -> None:
    asked = [each for each in components if each.bootstrap != "files"]
    known = cluster.mpi if asked else []
    for component in asked:
        mpi = str(component.resources.mpi)
        if known and mpi not in known:
            close = nearest(mpi, known)
            hint = f"{close} It has" if close else "use one of"
            raise ConfigError(
                f"{component.key}.mpi = {mpi!r}: is not known to srun; {hint} {', '.join(known)}"
            )


def over_limit(component: Component, limits: dict[str, str], flags: str = "") -> Limit | None:
    """Returns the first request that a partition refuses.

    Args:
        limits: of the partition.
        flags: of the job's QOS, some of which lift limits.
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


class Preemption(NamedTuple):
    """How a higher-priority job ends this one."""

    by: str
    """A partition, or a QOS."""
    mode: str
    """REQUEUE, CANCEL or SUSPEND."""
    grace_s: int
    """Grace period (GraceTime)."""
    is_told: bool = True
    """Whether Slurm sends our signal first; TERM alone is ambiguous."""

    @property
    def notice_s(self) -> int:
        """Seconds between announcement and end; 0: not announced."""
        return self.grace_s * self.is_told

    @property
    def lack(self) -> str:
        """Says in the cluster's words why nothing is announced."""
        said = f"GraceTime = {self.grace_s}"
        return said if self.is_told else f"{said}, without preempt_send_user_signal"


def check_preemption(
    components: Sequence[Component],
    cluster: Cluster,
    *,
    save_every: int,
    save_s: float | None,
    whose: str = "this run",
    say: Say,
) -> None:
    """Warns what a preemption, or the time limit, would cost the run.

    Args:
        components: in the order of the job.
        save_every: steps between checkpoints.
        save_s: seconds of the longest save of this run or a similar one; None if unknown.
        whose: the run of that save, in words.
        say: gets one message per preempting partition or QOS.

    Raises:
        ConfigError: the job sets --requeue, and nobody would requeue it.
    """
    margin_s, ahead_s = requeue.MARGIN_S, requeue.SIGNAL_AHEAD_S
    asked = components[0].resources.sbatch
    if cluster.config.get("JobRequeue") == "0" and "--no-requeue" not in asked:
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
        found = _preemption(component.resources, cluster)
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


def _preemption(resources: Resources, cluster: Cluster) -> Preemption | None:
    """Returns how a component can be preempted; None if it cannot, or is unknown."""
    config, found = cluster.config, None
    kind = config.get("PreemptType", "")
    said = [value for name, value in config.items() if name.endswith("Parameters")]
    is_told = any(re.search(r"\b(preempt_)?send_user_signal\b", each) for each in said)
    if kind == "preempt/qos" and resources.qos:
        default = config.get("PreemptMode", "OFF")
        found = preemption_by_qos(cluster.qos, resources.qos, default)
    if kind == "preempt/partition_prio":
        with suppress(ConfigError):
            names = (resources.partition or cluster.nodes.default or "").split(",")
            found = preemption_by_partition(cluster.limits, cluster.nodes, names)
    return found and found._replace(is_told=is_told)


def preemption_by_partition(
    limits: dict[str, dict[str, str]], known: Partitions, names: Sequence[str]
) -> Preemption | None:
    """Returns the preemption by the first of some partitions that a higher tier preempts.

    Args:
        limits: see `parse_limits`.
        known: the nodes of each.
        names: the component's partitions.
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


def preemption_by_qos(known: Mapping[str, Qos], name: str, default: str) -> Preemption | None:
    """Returns the preemption of a QOS by another; `default` is the cluster's mode."""
    if name not in known or not any(name in each.preempts.split(",") for each in known.values()):
        return None
    qos = known[name]
    mode = _mode(default if qos.mode.upper() in ("", "CLUSTER") else qos.mode)
    hours, minutes, seconds = ([0, 0, 0, *map(int, re.findall(r"\d+", qos.grace))])[-3:]
    grace_s = (hours * 60 + minutes) * 60 + seconds
    return Preemption(f"QOS {name}", mode, grace_s) if mode else None


def _mode(said: str) -> str | None:
    """Returns the mode among Slurm's comma-separated words, or None."""
    words = said.upper().split(",")
    return next((mode for mode in ("REQUEUE", "CANCEL", "SUSPEND") if mode in words), None)


def _words(*command: str) -> str:
    answer = output_of(command)
    return "" if answer.returncode else answer.stdout


def check_number(components: Sequence[Component], cluster: Cluster) -> None:
    """Slurm counts each component as a job: with a lower limit of running jobs, none ever starts.

    Args:
        components: of one job, with their own nodes.

    Raises:
        ConfigError: names the QOS or account with the limit.
    """
    said = cluster.config
    if len(components) < 2 or "limits" not in said.get("AccountingStorageEnforce", ""):
        return
    limits, qos_of = _limits_of_accounts(said.get("ClusterName", ""))
    limits |= {f"QOS {name}": each[-3:] for name, each in cluster.qos.items()}
    before = {name for name, each in cluster.qos.items() if "OverPartQOS" in each.flags}
    known = cluster.limits
    default = next((name for name, each in known.items() if each.get("Default") == "YES"), "")
    counted: dict[tuple[str, str], list[str]] = {}
    for each in components:
        asked = each.resources
        if (partition := asked.partition or default) not in known:
            continue  # one of several
        account = asked.account or (next(iter(qos_of)) if len(qos_of) == 1 else "")
        several = [known[partition].get("QoS", ""), asked.qos or qos_of.get(account, "")]
        owners = [f"QOS {name}" for name in sorted(several, key=lambda name: name not in before)]
        for kind in range(3):  # of each, whoever has one first sets it
            of_kind = ((o, limits[o][kind]) for o in [*owners, f"account {account}"] if o in limits)
            if found := next((pair for pair in of_kind if pair[1]), None):
                counted.setdefault(found, []).append(each.key)
    for (owner, most), keys in counted.items():
        if len(set(keys)) > int(most):
            raise ConfigError(
                f"{', '.join(dict.fromkeys(keys))}: {owner} lets {most} of your jobs run at a "
                f"time, and each of these {len(set(keys))} counts as one: Slurm would never start "
                "them; use another"
            )


def _limits_of_accounts(cluster: str) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Returns this user's limits per account, as those of a QOS, and each account's default QOS."""
    limits, qos_of = dict[str, tuple[str, ...]](), dict[str, str]()
    asked = (f"user={_me()}", f"cluster={cluster}")
    for account, qos, most, of_all in _rows(
        "assoc", *asked, "format=Account,DefaultQOS,MaxJobs,GrpJobs"
    ):
        found = (most, "", of_all)
        # One for each partition, maybe: what they do not agree on is not known.
        is_said = limits.setdefault(f"account {account}", found) == found
        limits[f"account {account}"] = found if is_said else ("", "", "")
        qos_of[account] = qos
    return limits, qos_of


def _me() -> str:
    """Returns the user's name; the number if unnamed, which accounting does not know."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # by version of Python
        return str(os.geteuid())


def _rows(*asked: str) -> list[list[str]]:
    answer = output_of(["sacctmgr", "-nP", "show", *asked])
    return [] if answer.returncode else [line.split("|") for line in answer.stdout.splitlines()]


def estimate_start(job: script.Job, components: Sequence[Component]) -> str:
    """Lets Slurm test a job without queueing it.

    Returns:
        The expected start, as of now.

    Raises:
        ConfigError: Slurm would refuse it; names the component and the possible keys.
    """
    answer = _try_out(job, components)
    if answer.returncode:
        if is_silent(answer):
            raise ConfigError(f"{words_of(answer)}; check where Slurm answers, or with --local")
        raise ConfigError(_explain(job, components, answer))
    said = re.search(r"to start at (\S+)", answer.stderr)
    return f"Slurm would start it at {said[1].replace('T', ' ')}" if said else "Slurm would take it"


def _try_out(job: script.Job, components: Sequence[Component]) -> CompletedProcess[str]:
    with tempfile.NamedTemporaryFile(suffix=".sh") as file:
        file.write(os.fsencode(script.slurm_script(job, components)))
        file.flush()
        return sbatch(["--test-only", file.name], _TRIAL_S)


def _explain(
    job: script.Job, components: Sequence[Component], answer: CompletedProcess[str]
) -> str:
    """Names the refused component, and the keys that may be the cause."""
    hosts = [each for each in components if each.on is None]
    refused = None
    for each in hosts if len(hosts) > 1 else []:
        alone = _try_out(job, [replace(each, bootstrap="files")])
        if alone.returncode:
            refused, answer = each, alone
            break
    words = re.sub("allocation failure: ", "", words_of(answer))
    unasked = type(hosts[0].resources).model_fields
    suspects = [refused] if refused else hosts
    fields = next(fields for cause, fields in _CAUSES if re.search(cause, words))
    keys = [
        f"{each.key}.{name} = {value!r}"
        for each in suspects
        for name in fields
        if (value := getattr(each.resources, name)) != unasked[name].default
    ]
    whole = f"{refused.key}" if refused else "the job"
    return f"{', '.join(keys) or whole}: {words}{_describe_allowed(fields)}"


def _describe_allowed(fields: Sequence[str]) -> str:
    if fields == ("account",) and (accounts := associations("Account")):
        return f"; yours are {', '.join(accounts)}"
    if fields == ("qos",) and (names := associations("QOS")):
        return f"; yours are {', '.join(names)}"
    if fields == ("constraint",) and (features := _features()):
        return f"; its nodes have {', '.join(features)}"
    if fields == ("constraint",):
        return "; no node has a feature, leave it out"
    return "; change it"


def associations(column: str) -> list[str]:
    """Returns the accounts or QOS that this user may name; empty without accounting."""
    rows = _rows("assoc", f"user={_me()}", f"format={column}")
    return sorted({name for (names,) in rows for name in names.split(",") if name})


def _features() -> list[str]:
    answer = output_of(["sinfo", "-h", "-o", "%f"])
    found = {name for line in answer.stdout.split() for name in line.split(",")}
    return sorted(found - {"(null)"})
