"""Slurm's own word on a job that is not queued: would it take it, and when would it start it."""

import getpass
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from subprocess import CompletedProcess

from relax_hpc.errors import ConfigError
from relax_hpc.launch import partitions, script
from relax_hpc.launch.jobs import is_silent, output_of, words_of
from relax_hpc.launch.placement import Component
from relax_hpc.launch.slurm import sbatch

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
"""Words of sbatch -> fields of resources that they may be about."""


def expected_start(job: script.Job, components: Sequence[Component]) -> str:
    """Has Slurm try a job out, and queues nothing.

    Returns:
        When Slurm would start it, as of now.

    Raises:
        ConfigError: Slurm would refuse it; names the component and the keys that it may be.
    """
    answer = _try_out(job, components)
    if answer.returncode:
        if is_silent(answer):
            raise ConfigError(f"{words_of(answer)}; check where Slurm answers, or with --local")
        raise ConfigError(_explained(job, components, answer))
    said = re.search(r"to start at (\S+)", answer.stderr)
    return f"Slurm would start it at {said[1].replace('T', ' ')}" if said else "Slurm would take it"


def check_number(components: Sequence[Component]) -> None:
    """To Slurm every component is a job: where fewer may run at a time, it never starts any.

    Args:
        components: of one job, with nodes of their own.

    Raises:
        ConfigError: names the QOS, or the account, that does not allow as many.
    """
    config = output_of(["scontrol", "show", "config"]).stdout
    said = dict(re.findall(r"^(\w+)\s*= (.*)$", config, re.MULTILINE))
    if len(components) < 2 or "limits" not in said.get("AccountingStorageEnforce", ""):
        return
    limits, qos_of = _limits_of_accounts(said.get("ClusterName", ""))
    before = set()
    for name, flags, *of_qos in _rows("qos", "format=Name,Flags,MaxJobsPU,MaxJobsPA,GrpJobs"):
        limits[f"QOS {name}"] = of_qos
        before |= {name} if "OverPartQOS" in flags else set()
    known = partitions.parse_limits(output_of(partitions.PARTITIONS).stdout)
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


def _limits_of_accounts(cluster: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Returns this user's limits in each account, as `sacctmgr` has them of a QOS, and the QOS that
    is the default there."""
    limits, qos_of = dict[str, list[str]](), dict[str, str]()
    asked = (f"user={getpass.getuser()}", f"cluster={cluster}")
    for account, qos, most, of_all in _rows(
        "assoc", *asked, "format=Account,DefaultQOS,MaxJobs,GrpJobs"
    ):
        found = [most, "", of_all]
        # One for each partition, maybe: what they do not agree on is not known.
        is_said = limits.setdefault(f"account {account}", found) == found
        limits[f"account {account}"] = found if is_said else ["", "", ""]
        qos_of[account] = qos
    return limits, qos_of


def _rows(*asked: str) -> list[list[str]]:
    answer = output_of(["sacctmgr", "-nP", "show", *asked])
    return [] if answer.returncode else [line.split("|") for line in answer.stdout.splitlines()]


def _try_out(job: script.Job, components: Sequence[Component]) -> CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script.slurm_script(job, components))
        file.flush()
        return sbatch(["--test-only", file.name], _TRIAL_S)


def _explained(
    job: script.Job, components: Sequence[Component], answer: CompletedProcess[str]
) -> str:
    """Names the component that is refused, and those of its keys that it may be."""
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
    return f"{', '.join(keys) or whole}: {words}{_allowed(fields)}"


def _allowed(fields: Sequence[str]) -> str:
    """Tells what a user may say instead."""
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
    """Names that accounting lets this user say: accounts, or QOS; none without accounting."""
    rows = _rows("assoc", f"user={getpass.getuser()}", f"format={column}")
    return sorted({name for (names,) in rows for name in names.split(",") if name})


def _features() -> list[str]:
    answer = output_of(["sinfo", "-h", "-o", "%f"])
    found = {name for line in answer.stdout.split() for name in line.split(",")}
    return sorted(found - {"(null)"})
