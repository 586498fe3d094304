"""`control/launch.json`: what `submit` and `resume` started. Status, logs and cancel begin here."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from relax_hpc.comm.process_id import ProcessId
from relax_hpc.errors import ConfigError
from relax_hpc.paths import RunPaths
from relax_hpc.printable import argument
from relax_hpc.records import read_json, write_json, write_json_once

_CLAIM_S = 900
"""Seconds after which a claim whose process cannot be looked at promises no job any more."""


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
    """Id of the job; of two, that of rollout."""
    components: tuple[LaunchedComponent, ...]
    time: float
    controller: ProcessId | None
    """The process that runs the script of a local job."""
    node: str | None = None
    """Node on which that process runs."""
    number: int = 1
    """The first is the one by `submit`."""
    earlier: tuple["LaunchRecord", ...] = ()
    """Launches before this one, oldest first."""

    @property
    def leaders(self) -> tuple[str, ...]:
        """Ids of its jobs: two where the sides of the run are apart."""
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
        """Whether it is a local job of another machine, whose processes cannot be seen here."""
        return self.controller is not None and self.node not in (None, socket.gethostname())


def read(run_dir: Path) -> LaunchRecord:
    """Reads the record of a run.

    Raises:
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
    """Records a launch and those before it; by the process that has claimed its number."""
    earlier = [_fields(each) for each in launched.earlier]
    write_json(paths.launch_record, {**_fields(launched), "earlier": earlier, **provenance})


def _fields(launched: LaunchRecord) -> dict[str, Any]:
    fields = asdict(replace(launched, earlier=()))
    for each in fields["components"]:
        del each["folder"]  # the run may be moved
    del fields["earlier"]
    return fields


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


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
    """Makes this process the one that starts the run next: of several, one succeeds.

    Args:
        paths: of the run.
        newest: launch of the run, as this process has looked at it and found it ended.
        sure: a claim of somebody who has died counts for nothing, unless a launch came of it.

    Returns:
        The number that was claimed. The claim stays, and a job of an earlier launch that begins
        afterwards, e.g. since Slurm requeued it, ends at once.

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
        path.unlink()
        raise
    return number


def _check_newest(paths: RunPaths, newest: LaunchRecord) -> None:
    """Makes sure that nobody has recorded a launch since: of that one nothing is known to end."""
    found = read(paths.root)
    if found.number != newest.number:
        raise ConfigError(
            f"{paths.root}: was resumed meanwhile, as job {found.leader}; nothing was started. "
            f"Look at it with relax-hpc status {argument(paths.root)}, and resume it again if that "
            "job ended"
        )


def unrecorded(paths: RunPaths, launched: LaunchRecord) -> Path | None:
    """The claim of somebody who has begun to start the run and has not recorded a job."""
    path = paths.launch_claim(launched.number + 1)
    return path if path.exists() else None


def _is_void(path: Path) -> bool:
    """Whether there is a claim there whose process has died, or must have."""
    found = read_json(path)
    if found is None:
        return False
    if found["node"] == socket.gethostname():
        return ProcessId.read(found).find() is None
    return bool(time.time() - found["time"] > _CLAIM_S)
