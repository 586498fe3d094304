"""Why a run failed, in a line: which component, how it ended, and what it said."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.launch.record import LaunchRecord
from relax_hpc.launch.script import batch_log
from relax_hpc.paths import ComponentPaths, RunPaths

_ENDED = re.compile(
    r"^\S+ (?P<component>\S+): start (?P<start>\d+) ended with exit code (?P<code>\d+)$"
)
_GAVE_UP = re.compile(r"^\S+ \S+: .*, giving up$")
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt)\b")
_TAIL_BYTES = 1 << 16


class _End(NamedTuple):
    """The component for whose sake the script ended the others."""

    component: str
    starts: int
    code: int


def text(run_dir: Path, launched: LaunchRecord) -> str:
    """Tells what is known of the failure of a launch; empty if nothing is.

    The script names the component that it gave up, or else the last one that failed; that
    component's newest `error` event, or else the end of what its tasks printed, says why.
    """
    lines = _tail(batch_log(launched.folder, launched.leader))
    end = _end(lines)
    if end is None:  # its first lines failed already, or Slurm ended it
        return lines[-1] if lines else ""
    failed = f"failed {end.starts} times" if end.starts > 1 else "failed"
    how = f"{end.component} {failed}, exit code {end.code}"
    names = end.component.split("+")
    why = _last_error(run_dir, names, launched.time) or _last_words(launched, names)
    return f"{how}: {why}" if why else how


def _end(lines: list[str]) -> _End | None:
    found = None
    for line in lines:
        if (match := _ENDED.match(line)) and match["code"] not in ("0", "143"):
            found = _End(match["component"], int(match["start"]), int(match["code"]))
        elif _GAVE_UP.match(line):
            break  # whatever ends after this was ended for it
    return found


def _last_error(run_dir: Path, names: list[str], since: float) -> str:
    folder = RunPaths(run_dir).events_folder
    paths = [path for name in names for path in folder.glob(f"{name}-*.jsonl")]
    lines = [line for path in paths for line in _tail(path) if '"event": "error"' in line]
    events = [event for event in map(_event, lines) if event.get("time", 0) >= since]
    if not events:
        return ""
    newest = max(events, key=lambda event: event["time"])
    said = str(newest["message"]).splitlines()
    return f"{newest['role']}-{newest['rank']}: {said[0] if said else ''}"


def _event(line: str) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:  # cut short
        return {}
    return event


def _last_words(launched: LaunchRecord, names: list[str]) -> str:
    for component in launched.components:
        if component.name not in names:
            continue
        for task in range(component.tasks):
            lines = _tail(ComponentPaths(component.folder, launched.leader).log(task, "err"))
            said = [line for line in lines if _ERROR.match(line)] or lines
            if said:
                return f"{component.name}-{task}: {said[-1]}"
    return ""


def _tail(path: Path) -> list[str]:
    """The last lines of a file that may not be there, without empty ones."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    return [line for line in data.decode(errors="replace").splitlines() if line.strip()]
