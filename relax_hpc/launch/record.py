"""Reads and writes `control/launch.json`, the record of started jobs for status, logs and
cancel."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from relax_hpc.errors import ConfigError, without_number
from relax_hpc.runtime.files.records import read_json, retract, write_json, write_json_once
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.process import ProcessId
from relax_hpc.runtime.text import argument

_CLAIM_S = 900
"""Seconds after which a claim by an unreachable process expires."""


@dataclass(frozen=True, slots=True)
class LaunchedComponent:
    name: str
    job_id: str
    """Name of the component for `squeue`."""
    tasks: int
    folder: Path

    @property
    def leader(self) -> str:
        """Id of its whole job, which names its files."""
        return self.job_id.partition("+")[0]


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One launch of a run: by `submit`, or by `resume`."""

    mode: str
    leader: str
    """Id of the job; of rollout's if there are two."""
    components: tuple[LaunchedComponent, ...]
    time: float
    controller: ProcessId | None
    """The process that runs the script of a local job."""
    node: str | None = None
    """Node of that process."""
    number: int = 1
    """1 is `submit`'s."""
    earlier: tuple["LaunchRecord", ...] = ()
    """Earlier launches, oldest first."""

    @property
    def leaders(self) -> tuple[str, ...]:
        """Ids of its jobs: two if the run's sides are separate."""
        return tuple(dict.fromkeys(each.leader for each in self.components))

    @property
    def folder(self) -> Path:
        return self.components[0].folder.parent

    @property
    def all(self) -> tuple["LaunchRecord", ...]:
        """Every launch of the run, newest first."""
        return (self, *reversed(self.earlier))

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is a local job of another machine."""
        return self.controller is not None and self.node not in (None, socket.gethostname())


def read(run_dir: Path) -> LaunchRecord:
    """Raises:
    ConfigError: not a run directory, nothing was started in it, or the record is not ours.
    """
    paths = RunPaths(run_dir.absolute())
    try:
        record = read_json(paths.launch_record)
        if record is not None:
            earlier = tuple(_parse(paths, each) for each in record.get("earlier", ()))
            return _parse(paths, record, earlier)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{paths.launch_record}: is not what submit wrote there ({_short(error)}); restore "
            "it, or find the run's jobs by the names of the files in submission/ and see to them "
            "with squeue and scancel"
        ) from error
    reason = "has not been submitted" if paths.config.exists() else "is not a run directory"
    raise ConfigError(f"{run_dir}: {reason} (no {paths.launch_record.relative_to(paths.root)})")


def write(paths: RunPaths, launched: LaunchRecord, provenance: Mapping[str, Any]) -> None:
    """Records a launch with earlier ones; only for the process that claimed its number."""
    earlier = [_fields(each) for each in launched.earlier]
    write_json(paths.launch_record, {**_fields(launched), "earlier": earlier, **provenance})


def _fields(launched: LaunchRecord) -> dict[str, Any]:
    fields = asdict(replace(launched, earlier=()))
    for each in fields["components"]:
        del each["folder"]  # the run may be moved
    del fields["earlier"]
    return fields


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {without_number(error)}".splitlines()[0]


def _parse(
    paths: RunPaths, record: dict[str, Any], earlier: tuple[LaunchRecord, ...] = ()
) -> LaunchRecord:
    components = tuple(
        LaunchedComponent(
            each["name"], str(each["job_id"]), int(each["tasks"]), paths.component(each["name"])
        )
        for each in record["components"]
    )
    if not components:
        raise ValueError("it has no components")
    controller = ProcessId.read(record["controller"]) if record.get("controller") else None
    return LaunchRecord(
        record["mode"],
        str(record["leader"]),
        components,
        float(record["time"]),
        controller,
        record.get("node"),
        int(record.get("number", 1)),
        earlier,
    )


def claim(paths: RunPaths, newest: LaunchRecord, *, sure: bool) -> int:
    """Claims the next launch: only one of several processes succeeds.

    Args:
        newest: launch that this process has found ended.
        sure: ignore claims of dead processes, unless a launch followed.

    Returns:
        The claimed number. The claim stays; a job of an earlier launch that starts later, e.g.
            requeued
        by Slurm, ends at once.

    Raises:
        ConfigError: somebody else has claimed it, or has started it meanwhile.
    """
    number = newest.number + 1
    while sure and _is_void(paths.launch_claim(number)):
        # Before the next is claimed: a job that begins ends at once if there is a claim after its.
        _check_newest(paths, newest)
        number += 1
    path = paths.launch_claim(number)
    mine = {"time": time.time(), "node": socket.gethostname(), **asdict(ProcessId.of(os.getpid()))}
    if not write_json_once(path, mine):
        raise ConfigError(
            f"{paths.root}: somebody else is starting it, see {path}; look at it again with "
            f"relax-hpc status {argument(paths.root)}. If that one died, and squeue shows no job "
            "of this run, add --ended"
        )
    try:
        _check_newest(paths, newest)
    except ConfigError:
        retract(path)
        raise
    return number


def _check_newest(paths: RunPaths, newest: LaunchRecord) -> None:
    """Checks that no launch was recorded since, which might still run."""
    found = read(paths.root)
    if found.number != newest.number:
        raise ConfigError(
            f"{paths.root}: was resumed meanwhile, as job {found.leader}; nothing was started. "
            f"Look at it with relax-hpc status {argument(paths.root)}, and resume it again if that "
            "job ended"
        )


def find_unrecorded(paths: RunPaths, launched: LaunchRecord) -> Path | None:
    """Returns the claim of a process that has begun to start the run without a recorded job."""
    path = paths.launch_claim(launched.number + 1)
    return path if path.exists() else None


def _is_void(path: Path) -> bool:
    """Whether a claim's process has died, or must have."""
    found = read_json(path)
    if found is None:
        return False
    if found["node"] == socket.gethostname():
        return ProcessId.read(found).find() is None
    return bool(time.time() - found["time"] > _CLAIM_S)
