"""Says why a run failed or ended, and keeps the last verdict on it, with the reaction.

    python -m relax_hpc.runs.verdict RUN_DIR --job-id ID --what restarted ...

The job's script calls it, and so do requeue, cancel and the end of a job.
"""

import argparse
import json
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from relax_hpc.errors import ConfigError, ends_of
from relax_hpc.launch import record, requeue
from relax_hpc.launch.record import LaunchRecord
from relax_hpc.launch.script import batch_log
from relax_hpc.runs.logs import find_printed
from relax_hpc.runtime.files import permissions, storage
from relax_hpc.runtime.files.records import read_bytes, write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import history
from relax_hpc.runtime.telemetry.events import FREQUENT, Event, read_events, read_newest

What = Literal[
    "restarted", "waiting", "ended", "setup", "requeued", "refused", "stopped", "cancelled",
    "completed",
]  # fmt: skip
_STAYS: dict[str, tuple[str, ...]] = {
    "restarted": ("requeued",),
    "waiting": ("requeued",),
    "ended": ("requeued", "ended", "setup"),
    "stopped": ("requeued", "refused", "ended", "setup"),
}
"""A verdict -> more informative ones of the same attempt, which it does not replace."""
_SRUN = re.compile(r"^srun: error: (?P<node>[\w.-]+): tasks? [\d,-]+: ")
_PATIENCE_S = 20.0
"""Seconds to retry storage: callers wait for half a minute."""
_MOST_CHARACTERS = 2000
"""Most characters of an error."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The failure of a component's step, as the script saw it."""

    component: str
    """Name; several in one step are joined by +."""
    start: int
    code: int
    since: float
    """When that start began."""
    failures: int = 0
    """Failures that count, including this one."""
    max_restarts: int = 0
    window_s: float = 0.0
    next_s: float = 0.0
    """Seconds before the next start."""
    ranks: tuple[int, ...] = ()
    """Ranks of its tasks; empty for all of the component."""

    @property
    def who(self) -> str:
        alone = f"-{self.ranks[0]}" if len(self.ranks) == 1 else ""
        return f"{self.component}{alone}"


@dataclass(frozen=True, slots=True)
class Verdict:
    time: float
    attempt: str
    """Job id and restart count."""
    what: What
    words: str
    component: str = ""
    start: int | None = None
    exit_code: int | None = None
    signal: str = ""
    node: str = ""
    error: str = ""
    """Last line of the error; empty if unknown."""
    failures: int | None = None
    max_restarts: int | None = None
    next_s: float | None = None

    @property
    def job_id(self) -> str:
        return self.attempt.rpartition(".")[0]


def read(run_dir: Path) -> Verdict | None:
    """Returns the last verdict; None if missing or unreadable."""
    with suppress(OSError, ValueError, TypeError):
        return Verdict(**json.loads(read_bytes(RunPaths(run_dir).verdict)))
    return None


def give(run_dir: Path, job_id: str, what: What, words: str, **facts: Any) -> None:  # noqa: ANN401
    """Replaces the last verdict, unless that says more about the same attempt.

    Args:
        job_id: of the leader.
        words: for people, without the reaction.
        facts: further fields of `Verdict`.
    """
    attempt, last = requeue.attempt_of(job_id), read(run_dir)
    if last and last.attempt == attempt and last.what in _STAYS.get(what, ()):
        return
    if _is_cancelled(run_dir, job_id, last) and what != "completed":
        return
    _write(run_dir, Verdict(time.time(), attempt, what, words, **facts))


def give_end(run_dir: Path, job_id: str, words: str) -> None:
    """Gives the verdict on a job that was told to end: Slurm may have requeued it.

    Args:
        job_id: of the leader.
        words: for people, if it was not requeued.
    """
    last = read(run_dir)
    if last and (last.attempt, last.what) == (requeue.attempt_of(job_id), "requeued"):
        return
    if requeue.was_requeued(job_id):
        give(run_dir, job_id, "requeued", _describe_requeues(requeue.num_restarts() + 1))
    else:
        give(run_dir, job_id, "stopped", words)


def give_requeue(run_dir: Path, job_id: str) -> None:
    """Gives the verdict on the previous attempt, if it left none."""
    last, times, now = read(run_dir), requeue.num_restarts(), requeue.attempt_of(job_id)
    before = f"{job_id}.{times - 1}"
    if last and (last.attempt == now or (last.attempt, last.what) == (before, "requeued")):
        return
    if _is_cancelled(run_dir, job_id, last):
        return
    _write(run_dir, Verdict(time.time(), before, "requeued", _describe_requeues(times)))


def _is_cancelled(run_dir: Path, job_id: str, last: Verdict | None) -> bool:
    is_told = last is not None and last.what == "cancelled"
    return is_told and storage.exists(RunPaths(run_dir).cancellation(job_id))


def _describe_requeues(times: int) -> str:
    return f"requeued by Slurm, for the time number {times}"


def _write(run_dir: Path, verdict: Verdict) -> None:
    with permissions.set_umask(permissions.umask_of(run_dir)):  # a command has its user's umask
        write_json(RunPaths(run_dir).verdict, asdict(verdict))


def judge(run_dir: Path, job_id: str, what: What, failed: Failed, done: str = "") -> None:
    """Gives the verdict on the failure of a component.

    Args:
        job_id: of the leader.
        failed: how it ended.
        done: the reaction; default follows from its numbers.
    """
    names = failed.component.split("+")
    error, task = last_error(run_dir, names, failed.since, failed.ranks) or ("", "")
    killed = signal_of(failed.code)
    if not error and not killed:
        with suppress(ConfigError):  # the job may begin before it is recorded
            error, task = last_words(record.read(run_dir), names, failed.ranks)
    error = ends_of(error, _MOST_CHARACTERS)
    node = _node(run_dir, job_id, names, task, failed.ranks)
    how = explain_signal(failed.code) if killed else f"ended with exit code {failed.code}"
    where = f" on {node}" if node else ""
    said = f"{failed.who}: start {failed.start} {how}{where}" + f" ({error})" * bool(error)
    give(
        run_dir, job_id, what, f"{said}; {done or _describe_end(what, failed)}",
        component=failed.component, start=failed.start, exit_code=failed.code, signal=killed,
        node=node, error=error, failures=failed.failures, max_restarts=failed.max_restarts,
        next_s=failed.next_s if what == "restarted" else None,
    )  # fmt: skip


def _describe_end(what: What, failed: Failed) -> str:
    window = f"{failed.window_s / 60:g} min"
    if what == "waiting":
        return "not counted, since Slurm's controller does not answer: started again once it does"
    if what == "restarted" and not failed.failures:
        return f"not counted, started again in {failed.next_s:g} s"
    if what == "restarted":
        left = failed.max_restarts - failed.failures
        return (
            f"started again in {failed.next_s:g} s, restart {failed.failures} of "
            f"{failed.max_restarts} within {window}, {left} left"
        )
    if failed.failures > failed.max_restarts:
        times = "once" if failed.failures == 1 else f"{failed.failures} times"
        return f"failed {times} within {window}, which ended the run"
    return "would fail again in the same way, which ended the run"


def _node(run_dir: Path, job_id: str, names: Sequence[str], task: str, ranks: Sequence[int]) -> str:
    """Returns the node of the failure; empty if unknown."""
    paths = RunPaths(run_dir)
    started = [e for e in read_events(paths.events_folder, but=FREQUENT) if e["event"] == "start"]
    started = [e for e in started if e["role"] in names and (not ranks or e["rank"] in ranks)]
    nodes = {f"{e['role']}-{e['rank']}": str(e["node"]) for e in started}
    if task in nodes:
        return nodes[task]
    if len(of_all := set(nodes.values())) == 1:
        return of_all.pop()
    said = map(_SRUN.match, tail(batch_log(paths.submission, job_id)))
    found = [match["node"] for match in said if match and match["node"] in of_all]
    return found[-1] if found else ""


_ENDED = re.compile(
    r"^\S+ (?P<component>\S+): start (?P<start>\d+) ended with exit code (?P<code>\d+)$"
)
_SETUP = re.compile(r"^\S+ (?P<words>\S+: setup ended with exit code \d+: .*)$")
_GAVE_UP = re.compile(r"^\S+ \S+: .*, giving up$")
_LAUNCH = re.compile(r"^srun: error: (?P<words>.* launch failed: .*)$")
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt)\b")
_FOR_ANOTHER = re.compile(
    r"PeerTimeoutError|FencedError|Dist\w*Error|Connection\w*Error|BrokenPipeError"
    r"|\w+: .*([Cc]onnection (closed|reset)|[Bb]roken pipe|this update was given up|remote process)"
)
"""Prefix of errors that follow from another task's end or silence."""
_TAIL_BYTES = 1 << 16


class _FirstFailure(NamedTuple):
    """The component whose failure made the script end the others."""

    component: str
    starts: int
    code: int


class Failure(NamedTuple):
    """The cause of a failure, as far as it is known."""

    text: str
    log: str
    """The log to read; empty if there is none."""


NOTHING = Failure("", "")

_STATES = {
    "TIMEOUT": "its time limit was over, and it was not requeued",
    "OUT_OF_MEMORY": "it took more memory than it had asked for; ask for more with resources.mem",
    "NODE_FAIL": "a node failed, and Slurm did not requeue it",
    "BOOT_FAIL": "a node did not boot",
    "PREEMPTED": "another job took its nodes, and Slurm did not requeue it",
    "DEADLINE": "its deadline was over",
}
"""Slurm states that explain the end of a job."""

_SPEECHLESS = {"SIGKILL": ("by somebody, or by its node for want of memory (resources.mem)", "")}
"""Signals without a message from the task -> who may have sent them. The last output says
nothing then."""

_OF_LIMITS = {
    name: f" ({words} of the shell that submitted, see ulimit -a; resources.sbatch = "
    '["--propagate=NONE"] leaves it behind)'
    for name, words in {"SIGXCPU": "CPU time limit", "SIGXFSZ": "file size limit"}.items()
}
"""Signal -> the resource limit behind it."""

_UNSEEN = (
    "Slurm began no log of its script in {}: it seems that its first node does not see that "
    "folder, or may not write there; submit a run whose run_root every node sees at the same path"
)


def explain(run_dir: Path, launched: LaunchRecord, state: str) -> Failure:
    """Explains the failure of a launch.

    The script names the component that it gave up, or else the last failed one. That component's
    newest `error` event, or else the end of its output, gives the reason.
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
        explain_signal(end.code) if killed else f"exit code {end.code}"
    )
    why, task = (
        last_error(run_dir, names, launched.time)
        or _SPEECHLESS.get(killed)
        or last_words(launched, names)
    )
    log = _log_of(launched, task) or script_log
    return Failure(f"{how}: {why}" if why else how, str(log))


def signal_of(code: int) -> str:
    """Names the signal behind an exit code; empty if none."""
    try:
        return signal.Signals(code - 128).name if code > 128 else ""
    except ValueError:
        return ""


def explain_signal(code: int) -> str:
    """Names the signal behind an exit code, and its resource limit if any."""
    killed = signal_of(code)
    return f"killed by {killed}{_OF_LIMITS.get(killed, '')}"


def _log_of(launched: LaunchRecord, task: str) -> Path | None:
    """Returns the file of a task's output, if any."""
    for each in launched.components:
        for name, path in find_printed(each, ("err",)):
            if name == task and path.exists() and path.stat().st_size:
                return path
    return None


def _end(lines: list[str]) -> _FirstFailure | None:
    found = None
    for line in lines:
        if (match := _ENDED.match(line)) and match["code"] not in ("0", "143"):
            found = _FirstFailure(match["component"], int(match["start"]), int(match["code"]))
        elif _GAVE_UP.match(line):
            break  # whatever ends after this was ended for it
    return found


def last_error(
    run_dir: Path, names: list[str], since: float, ranks: Sequence[int] = ()
) -> tuple[str, str] | None:
    """Returns the error that ended the newest start of these components, and its task.

    It is the first error that does not follow from another task's end. A hung task takes precedence
    over those that report it. With `ranks`, only these count.
    """
    folder = RunPaths(run_dir).events_folder
    paths = [path for name in names for path in folder.glob(f"{name}-*.jsonl")]
    said = list[Event]()
    for found in (read_newest(path, _TAIL_BYTES) for path in paths):
        begun = max((place for place, e in enumerate(found) if e["event"] == "start"), default=0)
        said += [event for event in found[begun:] if event["event"] in ("error", "hang")]
    events = history.align_clocks(said, history.find_late_clocks(folder))
    events = [event for event in events if event["time"] >= since]
    events = [event for event in events if not ranks or event["rank"] in ranks]
    hung = [event for event in events if event["event"] == "hang"]
    events = [event for event in hung if event["ended"]] or [e for e in events if e not in hung]
    if not events:
        return None
    events = list({(each["role"], each["rank"]): each for each in events}.values())
    causes = [event for event in events if not _FOR_ANOTHER.match(str(event["message"]))]
    first = min(causes or events, key=lambda event: event["time"])
    words, task = str(first["message"]).splitlines(), f"{first['role']}-{first['rank']}"
    return f"{task}: {words[0] if words else ''}", task


def last_words(
    launched: LaunchRecord, names: list[str], ranks: Sequence[int] = ()
) -> tuple[str, str]:
    """Returns the end of the output of one of these tasks, and which task; or why Slurm could not
    start any."""
    for component in launched.components:
        if component.name not in names:
            continue
        for name, path in find_printed(component, ("err",), ranks):
            lines = tail(path)
            if said := [line for line in lines if _ERROR.match(line)] or lines:
                return f"{name}: {said[-1]}", name
        lines = tail(batch_log(launched.folder, component.leader))
        if refused := [match["words"] for match in map(_LAUNCH.match, lines) if match]:
            unseen = f": it seems that its node does not see {component.folder}"
            return refused[-1] + unseen * ("connect IO" in refused[-1]), ""
    return "", ""


def tail(path: Path) -> list[str]:
    """Returns the last nonempty lines of a file, if it exists."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    return [line for line in data.decode(errors="replace").splitlines() if line.strip()]


def main() -> None:
    args = _parse()
    paths = RunPaths(args.run_dir)
    storage.settle(_PATIENCE_S)
    permissions.enter(paths)
    storage.settle(_PATIENCE_S, reserve=paths.reserve)
    if args.before:
        give_requeue(args.run_dir, args.job_id)
        return
    if args.component is None and args.what == "stopped":
        give_end(args.run_dir, args.job_id, args.words)
        return
    if args.component is None:
        give(args.run_dir, args.job_id, args.what, args.words)
        return
    failed = Failed(
        args.component, args.start, args.code, args.since, args.failures, args.max_restarts,
        args.window, args.next, tuple(args.ranks),
    )  # fmt: skip
    judge(args.run_dir, args.job_id, args.what, failed)


def _parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--what", required=True, help="see What")
    parser.add_argument("--before", action="store_true", help="of the attempt before this one")
    parser.add_argument("--words", default="", help="of a verdict on the whole job")
    parser.add_argument("--component", help="that failed; the others are of it")
    parser.add_argument("--ranks", type=int, nargs="+", default=[], help="if not of all its tasks")
    for name in ("start", "code", "failures", "max-restarts"):
        parser.add_argument(f"--{name}", type=int, default=0)
    for name in ("since", "window", "next"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
