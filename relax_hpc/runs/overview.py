"""Lists all runs of a user, for `relax-hpc ls`, tags and deletes them, and resolves
`submit --depend`."""

import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from relax_hpc.errors import ConfigError, LaunchError
from relax_hpc.launch import record, states
from relax_hpc.launch.record import LaunchRecord
from relax_hpc.runs import status
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import events
from relax_hpc.runtime.telemetry.events import Event
from relax_hpc.runtime.telemetry.progress import duration
from relax_hpc.runtime.text import align_lines, argument

_TAIL_BYTES = 1 << 18
"""Bytes of events searched for the newest step: dozens of steps."""
_WIDEST_NAME = 30


@dataclass(frozen=True, slots=True)
class OverviewRow:
    name: str
    run_dir: Path
    job_id: str
    state: str
    """As in `status`."""
    reason: str
    """Why Slurm has not started it yet."""
    step: int
    num_steps: int | None
    reward: float | None
    """Mean training reward of the newest step."""
    loss: float | None
    time: float
    """When it was submitted, seconds since 1970."""
    tags: list[str]


def collect(
    run_dirs: Sequence[Path], *, last: int | None = None, tag: str | None = None
) -> list[OverviewRow]:
    """Returns runs, newest first, with a single request to Slurm.

    Skips unfinished submissions and damaged records.

    Args:
        last: at most this many.
        tag: only those with it.
    """
    if tag is not None:
        run_dirs = [each for each in run_dirs if tag in tags_of(each)]
    found = list[tuple[Path, LaunchRecord]]()
    for run_dir in run_dirs:
        try:
            found.append((run_dir, record.read(run_dir)))
        except ConfigError:
            continue
    found.sort(key=lambda each: each[1].all[-1].time, reverse=True)
    found = found[:last]
    decided = status.decide([newest for _, newest in found])
    return [
        _row(run_dir, newest, launch)
        for (run_dir, newest), launch in zip(found, decided, strict=True)
    ]


def _row(run_dir: Path, newest: LaunchRecord, launch: status.Launch) -> OverviewRow:
    step = newest_step(RunPaths(run_dir))
    return OverviewRow(
        name=run_dir.name,
        run_dir=run_dir,
        job_id=launch.record.leader,
        state=launch.state,
        reason=launch.reason,
        step=step.get("step", 0),
        num_steps=num_steps_of(RunPaths(run_dir)),
        reward=step.get("reward/mean"),
        loss=step.get("loss"),
        time=newest.all[-1].time,
        tags=tags_of(run_dir),
    )


def tags_of(run_dir: Path) -> list[str]:
    """Returns the words by which a user finds a run again."""
    try:
        return list((read_json(RunPaths(run_dir).tags) or {})["tags"])
    except (OSError, ValueError, LookupError, TypeError):
        return []


def set_tags(run_dir: Path, tags: Sequence[str]) -> None:
    with permissions.set_umask(permissions.umask_of(run_dir)):
        write_json(RunPaths(run_dir).tags, {"tags": sorted(set(tags))})


def size_of(run_dir: Path) -> int:
    """Returns the bytes that a run takes on its file system."""
    found = [run_dir.lstat().st_size]
    for folder, _, files in os.walk(run_dir):
        for name in files:
            with suppress(OSError):  # a run may delete its shards meanwhile
                found.append(Path(folder, name).lstat().st_blocks * 512)
    return sum(found)


def remove(run_dir: Path) -> None:
    """Deletes a run's directory.

    Raises:
        ConfigError: it is not over.
        LaunchError: a file cannot be deleted.
    """
    launch = status.decisive(status.of_run(run_dir))
    if not states.is_over(launch.state):
        raise ConfigError(
            f"{run_dir.name}: is {launch.state}, and is not deleted; end it first: "
            f"relax-hpc cancel {argument(run_dir.name)}"
        )
    try:
        shutil.rmtree(run_dir.resolve())
    except OSError as error:
        raise LaunchError(f"{error.filename}: cannot be deleted: {error.strerror}") from error


def text(rows: Sequence[OverviewRow]) -> str:
    """Formats a line per run; runs of the same name are shown by directory."""
    names = [row.name for row in rows]
    lines = [("run", "state", "step", "reward", "age")]
    for row in rows:
        several = names.count(row.name) > 1
        state = row.state + (f" ({row.reason})" if row.reason else "")
        lines.append(
            (
                str(row.run_dir) if several else _short(row.name),
                state,
                f"{row.step}/{'?' if row.num_steps is None else row.num_steps}",
                _figure(row),
                duration(max(0.0, time.time() - row.time)),
            )
        )
    return "\n".join(align_lines(lines, left=2))


def to_json(rows: Sequence[OverviewRow]) -> str:
    return json.dumps([asdict(row) for row in rows], default=str, indent=1, allow_nan=False)


def _figure(row: OverviewRow) -> str:
    if row.reward is not None:
        return f"{row.reward:.3f}"
    return "-" if row.loss is None else f"loss {row.loss:.3f}"


def _short(name: str) -> str:
    return name if len(name) <= _WIDEST_NAME else f"{name[: _WIDEST_NAME - 1]}…"


def num_steps_of(paths: RunPaths) -> int | None:
    """Returns the steps of a job, also of older versions."""
    try:
        job = read_json(paths.config) or {}
        section = job.get("schedule") or job["sft"]
        return int(section["num_steps"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def newest_step(paths: RunPaths) -> Event:
    """Returns the newest step, or the one resumed from since; empty before the first."""
    found = events.read_newest(paths.events("actor", 0), _TAIL_BYTES)
    return next((e for e in reversed(found) if e["event"] in ("step", "resume")), {})


def on_job(asked: str) -> str | None:
    """Returns Slurm's dependency on completed jobs, or the user's own; None if it names no job."""
    if re.fullmatch(r"\d+(,\d+)*", asked):
        return f"afterok:{asked.replace(',', ':')}"
    if ":" in asked or asked == "singleton":
        return asked
    return None


def on_run(run_dir: Path) -> str | None:
    """Returns Slurm's dependency on a completed run; None if it has completed.

    Raises:
        ConfigError: it cannot complete any more, or Slurm does not know it.
    """
    launch = status.decisive(status.of_run(run_dir))
    key = f"--depend {run_dir.name}"
    if launch.state == "COMPLETED":
        return None
    if launch.record.controller is not None:
        raise ConfigError(f"{key}: runs without Slurm, which cannot wait for it; submit later")
    if states.is_over(launch.state):
        raise ConfigError(
            f"{key}: is {launch.state}, so nothing would ever begin; resume it first, or leave "
            "--depend out"
        )
    return f"afterok:{':'.join(launch.record.leaders)}"
