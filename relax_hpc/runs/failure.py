"""Why a run failed, in a line: which component, how it ended, and what it said."""

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.launch.record import LaunchRecord
from relax_hpc.launch.script import batch_log
from relax_hpc.paths import RunPaths
from relax_hpc.runs.logs import printed

_ENDED = re.compile(
    r"^\S+ (?P<component>\S+): start (?P<start>\d+) ended with exit code (?P<code>\d+)$"
)
_SETUP = re.compile(r"^\S+ (?P<words>\S+: setup ended with exit code \d+: .*)$")
_GAVE_UP = re.compile(r"^\S+ \S+: .*, giving up$")
_LAUNCH = re.compile(r"^srun: error: (?P<words>.* launch failed: .*)$")
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt)\b")
_FAILED = re.compile(r'"event": "(error|hang)"')
_TAIL_BYTES = 1 << 16


class _End(NamedTuple):
    """The component for whose sake the script ended the others."""

    component: str
    starts: int
    code: int


class Failure(NamedTuple):
    """The cause of a failure, as far as it is known."""

    text: str
    log: str
    """The file to read about it; empty if there is none."""


NOTHING = Failure("", "")

_STATES = {
    "TIMEOUT": "its time limit was over, and it was not requeued",
    "OUT_OF_MEMORY": "it took more memory than it had asked for; ask for more with resources.mem",
    "NODE_FAIL": "a node failed, and Slurm did not requeue it",
    "BOOT_FAIL": "a node did not boot",
    "PREEMPTED": "another job took its nodes, and Slurm did not requeue it",
    "DEADLINE": "its deadline was over",
}
"""Slurm's words for the end of a job that say why."""

_SPEECHLESS = {"SIGKILL": ("by somebody, or by its node for want of memory (resources.mem)", "")}
"""Signal under which nobody can say why -> who may have sent it, and no task that said so. What was
printed last is anything then."""

_UNSEEN = (
    "Slurm began no log of its script in {}: it seems that its first node does not see that "
    "folder, or may not write there; submit a run whose run_root every node sees at the same path"
)


def found(run_dir: Path, launched: LaunchRecord, state: str) -> Failure:
    """Tells what is known of the failure of a launch.

    The script names the component that it gave up, or else the last one that failed; that
    component's newest `error` event, or else the end of what its tasks printed, says why.
    """
    logs = [batch_log(launched.folder, leader) for leader in launched.leaders]
    # Of two jobs, the one whose script gave a component up.
    script_log = next((each for each in logs if _end(tail(each))), logs[0])
    lines = tail(script_log)
    if setup := next(filter(None, map(_SETUP.match, lines)), None):
        return Failure(setup["words"], str(script_log))
    end = _end(lines)
    if end is None:  # its first lines failed already, or Slurm ended it
        unseen = "" if launched.mode == "local" or script_log.exists() else _UNSEEN
        words = unseen.format(launched.folder)
        said = _STATES.get(state, lines[-1] if lines else words)
        return Failure(said, str(script_log) if lines else "")
    failed = f"failed {end.starts} times" if end.starts > 1 else "failed"
    killed, names = signal_of(end.code), end.component.split("+")
    how = f"{end.component} {failed}, " + (
        f"killed by {killed}" if killed else f"exit code {end.code}"
    )
    why, task = (
        last_error(run_dir, names, launched.time)
        or _SPEECHLESS.get(killed)
        or last_words(launched, names)
    )
    log = _log_of(launched, task) or script_log
    return Failure(f"{how}: {why}" if why else how, str(log))


def signal_of(code: int) -> str:
    """Names the signal that ended a program with this exit code; empty if none did."""
    try:
        return signal.Signals(code - 128).name if code > 128 else ""
    except ValueError:
        return ""


def _log_of(launched: LaunchRecord, task: str) -> Path | None:
    """Names the file of what a task printed, if it printed anything."""
    for each in launched.components:
        for name, path in printed(each, ("err",)):
            if name == task and path.exists() and path.stat().st_size:
                return path
    return None


def _end(lines: list[str]) -> _End | None:
    found = None
    for line in lines:
        if (match := _ENDED.match(line)) and match["code"] not in ("0", "143"):
            found = _End(match["component"], int(match["start"]), int(match["code"]))
        elif _GAVE_UP.match(line):
            break  # whatever ends after this was ended for it
    return found


def last_error(
    run_dir: Path, names: list[str], since: float, ranks: Sequence[int] = ()
) -> tuple[str, str] | None:
    """Returns the newest error that a task of these components said, and which task.

    One that hung is named rather than who said something of it. Of given ranks nobody else is.
    """
    folder = RunPaths(run_dir).events_folder
    paths = [path for name in names for path in folder.glob(f"{name}-*.jsonl")]
    lines = [line for path in paths for line in tail(path) if _FAILED.search(line)]
    events = [event for event in map(_event, lines) if event.get("time", 0) >= since]
    events = [event for event in events if not ranks or event["rank"] in ranks]
    hung = [event for event in events if event["event"] == "hang"]
    events = [event for event in hung if event["ended"]] or [e for e in events if e not in hung]
    if not events:
        return None
    newest = max(events, key=lambda event: event["time"])
    said, task = str(newest["message"]).splitlines(), f"{newest['role']}-{newest['rank']}"
    return f"{task}: {said[0] if said else ''}", task


def _event(line: str) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:  # cut short
        return {}
    return event


def last_words(
    launched: LaunchRecord, names: list[str], ranks: Sequence[int] = ()
) -> tuple[str, str]:
    """Returns the end of what a task of these components printed, or one of these ranks of it, and
    which task; or why Slurm could not start any."""
    for component in launched.components:
        if component.name not in names:
            continue
        for name, path in printed(component, ("err",), ranks):
            lines = tail(path)
            if said := [line for line in lines if _ERROR.match(line)] or lines:
                return f"{name}: {said[-1]}", name
        lines = tail(batch_log(launched.folder, component.leader))
        if refused := [match["words"] for match in map(_LAUNCH.match, lines) if match]:
            unseen = f": it seems that its node does not see {component.folder}"
            return refused[-1] + unseen * ("connect IO" in refused[-1]), ""
    return "", ""


def tail(path: Path) -> list[str]:
    """The last lines of a file that may not be there, without empty ones."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    return [line for line in data.decode(errors="replace").splitlines() if line.strip()]
