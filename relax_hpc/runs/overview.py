"""All runs of a user in a table: what `relax-hpc ls` prints."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_hpc.errors import ConfigError
from relax_hpc.launch import record
from relax_hpc.launch.record import LaunchRecord
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json
from relax_hpc.runs import status
from relax_hpc.telemetry.progress import duration
from relax_hpc.telemetry.tables import aligned

_TAIL_BYTES = 1 << 18
"""Bytes of events in which the newest step is looked for: dozens of steps."""
_WIDEST_NAME = 30


@dataclass(frozen=True, slots=True)
class Row:
    """One run."""

    name: str
    run_dir: Path
    job_id: str
    state: str
    """As `status` says it."""
    reason: str
    """Why Slurm has not started it yet."""
    step: int
    num_steps: int | None
    reward: float | None
    """Mean training reward of the newest step."""
    loss: float | None
    time: float
    """Time at which it was submitted, seconds since 1970."""


def collect(run_dirs: Sequence[Path], *, last: int | None = None) -> list[Row]:
    """Looks at runs, newest first, with one question to Slurm for all of them.

    Folders that `submit` has not finished, or whose record is damaged, are left out.

    Args:
        run_dirs: of the runs.
        last: so many at most.
    """
    found = list[tuple[Path, LaunchRecord]]()
    for run_dir in run_dirs:
        try:
            found.append((run_dir, record.read(run_dir)))
        except ConfigError:
            continue
    found.sort(key=lambda each: each[1].all[-1].time, reverse=True)
    found = found[:last]
    decided = status.decided([newest for _, newest in found])
    return [
        _row(run_dir, newest, launch)
        for (run_dir, newest), launch in zip(found, decided, strict=True)
    ]


def _row(run_dir: Path, newest: LaunchRecord, launch: status.Launch) -> Row:
    step = newest_step(RunPaths(run_dir))
    return Row(
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
    )


def text(rows: Sequence[Row]) -> str:
    """A line for each run; a run whose name another has, too, is called by its directory."""
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
    return "\n".join(aligned(lines, left=2))


def to_json(rows: Sequence[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], default=str, indent=1, allow_nan=False)


def _figure(row: Row) -> str:
    if row.reward is not None:
        return f"{row.reward:.3f}"
    return "-" if row.loss is None else f"loss {row.loss:.3f}"


def _short(name: str) -> str:
    return name if len(name) <= _WIDEST_NAME else f"{name[: _WIDEST_NAME - 1]}…"


def num_steps_of(paths: RunPaths) -> int | None:
    """The steps of a job, of an older version, too."""
    try:
        job = read_json(paths.config) or {}
        section = job.get("schedule") or job["sft"]
        return int(section["num_steps"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def newest_step(paths: RunPaths) -> dict[str, Any]:
    """The newest step, or the step that training has gone on from since; empty before the first."""
    path = paths.events("actor", 0)
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines):
        if b'"event": "step"' in line or b'"event": "resume"' in line:
            try:
                event: dict[str, Any] = json.loads(line)
            except ValueError:  # cut short
                continue
            return event
    return {}
