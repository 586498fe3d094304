"""The last verdict of a run: what failed or ended, why, and what was done about it.

    python -m relax_hpc.runs.verdict RUN_DIR --job-id ID --what restarted ...

The job's script tells it here as it supervises, and so do who requeues, cancels and ends a job.
"""

import argparse
import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from relax_hpc import permissions, storage
from relax_hpc.errors import ConfigError
from relax_hpc.launch import record, requeue
from relax_hpc.launch.script import batch_log
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_bytes, write_json
from relax_hpc.runs import failure
from relax_hpc.telemetry.events import FREQUENT, read_events

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
"""A verdict -> those of the same attempt that say more, and stay."""
_SRUN = re.compile(r"^srun: error: (?P<node>[\w.-]+): tasks? [\d,-]+: ")
_PATIENCE_S = 20.0
"""Patience with storage: who has it told waits for half a minute."""
_MOST_CHARACTERS = 2000
"""Characters of an error that are told."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The failure of a component's step, as the script saw it."""

    component: str
    """Name; of several in one step joined by +."""
    start: int
    code: int
    since: float
    """Time at which that start began."""
    failures: int = 0
    """Failures that count, this one among them."""
    max_restarts: int = 0
    window_s: float = 0.0
    next_s: float = 0.0
    """Seconds before the next start."""
    ranks: tuple[int, ...] = ()
    """Ranks of its tasks; empty if these are all of the component."""

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
    """Last line of the error; empty if nobody said one."""
    failures: int | None = None
    max_restarts: int | None = None
    next_s: float | None = None

    @property
    def job_id(self) -> str:
        return self.attempt.rpartition(".")[0]


def read(run_dir: Path) -> Verdict | None:
    """The last verdict; None if there is none, or it cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        return Verdict(**json.loads(read_bytes(RunPaths(run_dir).verdict)))
    return None


def give(run_dir: Path, job_id: str, what: What, words: str, **facts: Any) -> None:  # noqa: ANN401
    """Replaces the last verdict, unless that says more about the same attempt.

    Args:
        run_dir: of the run.
        job_id: of its leader.
        what: the kind of it.
        words: for people, without what was done about it.
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
        run_dir: of the run.
        job_id: of its leader.
        words: for people, where it was not.
    """
    last = read(run_dir)
    if last and (last.attempt, last.what) == (requeue.attempt_of(job_id), "requeued"):
        return
    if requeue.was_requeued(job_id):
        give(run_dir, job_id, "requeued", _requeued(requeue.num_restarts() + 1))
    else:
        give(run_dir, job_id, "stopped", words)


def give_requeue(run_dir: Path, job_id: str) -> None:
    """Gives the verdict on the attempt before this one, which ended without one that says so."""
    last, times, now = read(run_dir), requeue.num_restarts(), requeue.attempt_of(job_id)
    before = f"{job_id}.{times - 1}"
    if last and (last.attempt == now or (last.attempt, last.what) == (before, "requeued")):
        return
    if _is_cancelled(run_dir, job_id, last):
        return
    _write(run_dir, Verdict(time.time(), before, "requeued", _requeued(times)))


def _is_cancelled(run_dir: Path, job_id: str, last: Verdict | None) -> bool:
    """Whether the last verdict is that the run was cancelled, and this job with it."""
    is_told = last is not None and last.what == "cancelled"
    return is_told and storage.exists(RunPaths(run_dir).cancelled(job_id))


def _requeued(times: int) -> str:
    return f"requeued by Slurm, for the time number {times}"


def _write(run_dir: Path, verdict: Verdict) -> None:
    with permissions.masked(permissions.umask_of(run_dir)):  # a command has its user's umask
        write_json(RunPaths(run_dir).verdict, asdict(verdict))


def judge(run_dir: Path, job_id: str, what: What, failed: Failed, done: str = "") -> None:
    """Gives the verdict on the failure of a component.

    Args:
        run_dir: of the run.
        job_id: of its leader.
        what: the kind of it.
        failed: how it ended.
        done: what was done about it; unset is what its numbers say.
    """
    names = failed.component.split("+")
    error, task = failure.last_error(run_dir, names, failed.since, failed.ranks) or ("", "")
    killed = failure.signal_of(failed.code)
    if not error and not killed:
        with suppress(ConfigError):  # the job may begin before it is recorded
            error, task = failure.last_words(record.read(run_dir), names, failed.ranks)
    error = error[:_MOST_CHARACTERS]
    node = _node(run_dir, job_id, names, task, failed.ranks)
    how = f"killed by {killed}" if killed else f"ended with exit code {failed.code}"
    where = f" on {node}" if node else ""
    said = f"{failed.who}: start {failed.start} {how}{where}" + f" ({error})" * bool(error)
    give(
        run_dir, job_id, what, f"{said}; {done or _done(what, failed)}",
        component=failed.component, start=failed.start, exit_code=failed.code, signal=killed,
        node=node, error=error, failures=failed.failures, max_restarts=failed.max_restarts,
        next_s=failed.next_s if what == "restarted" else None,
    )  # fmt: skip


def _done(what: What, failed: Failed) -> str:
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
    """Returns the node where it failed; empty if that is not known."""
    paths = RunPaths(run_dir)
    started = [e for e in read_events(paths.events_folder, but=FREQUENT) if e["event"] == "start"]
    started = [e for e in started if e["role"] in names and (not ranks or e["rank"] in ranks)]
    nodes = {f"{e['role']}-{e['rank']}": str(e["node"]) for e in started}
    if task in nodes:
        return nodes[task]
    if len(of_all := set(nodes.values())) == 1:
        return of_all.pop()
    said = map(_SRUN.match, failure.tail(batch_log(paths.submission, job_id)))
    found = [match["node"] for match in said if match and match["node"] in of_all]
    return found[-1] if found else ""


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
