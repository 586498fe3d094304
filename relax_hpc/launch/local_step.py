"""Starts the tasks of one step on this machine and ends them together, like srun.

    python -m relax_hpc.launch.local_step --tasks N --output F --error F ... -- COMMAND ...

`%t` in the log names is the task. Each task is its own session, and is ended with everything it
started; processes that leave the session end with the step. Tasks die with this process, which ends
with the job's controller. The exit code is that of the first failed task.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.process import ProcessId, adopt_orphans, end_with_parent

_POLL_S = 0.05
_GRACE_S = 5.0
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
"""Signals that this process waits for; blocked, so that they interrupt nothing."""


@dataclass
class LocalStep:
    tasks: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    first_failure: int | None = None
    """Exit code of the first failed task; the others are ended because of it."""
    end_at: float | None = None
    """When tasks that were asked to end are killed."""

    @property
    def running(self) -> "list[subprocess.Popen[bytes]]":
        return [task for task in self.tasks if task.returncode is None]

    def signal(self, number: int) -> None:
        """Sends a signal to the tasks themselves, as srun does."""
        for task in self.running:
            # Not `send_signal`, which collects a task that has ended. Until `reap` does, its id is
            # nobody else's.
            os.kill(task.pid, number)

    def end(self) -> None:
        """Asks the tasks to end; `reap` kills them after a grace period."""
        if self.end_at is None:
            self.end_at = time.monotonic() + _GRACE_S
            self.signal(signal.SIGTERM)

    def kill(self) -> None:
        for task in self.running:
            os.killpg(task.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Reaps ended tasks and their orphans, which become ours."""
        if self.end_at is not None and time.monotonic() > self.end_at:
            self.kill()
        while found := _reap(os.WNOWAIT):
            task = next((each for each in self.running if each.pid == found), None)
            if task is None:
                os.waitpid(found, 0)
                continue
            # Look without collecting: until it is collected, its id still names its own group.
            os.killpg(task.pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(task.pid, 0)[1])
            task.returncode = 128 - code if code < 0 else code
            if code != 0:
                self.first_failure = self.first_failure or task.returncode
                self.end()


def _reap(options: int = 0) -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | options)
    except ChildProcessError:
        return None
    return found.si_pid if found else None


def main() -> None:
    args = _parse()
    controller = ProcessId.of(args.controller)
    adopt_orphans()  # what outlives the task that started it is our child
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    step = LocalStep()
    for rank in range(args.tasks):
        if not signal.sigpending() & {signal.SIGTERM, signal.SIGINT}:
            step.tasks.append(_start(rank, args, before))
    record_processes(args.processes, [os.getpid(), *(task.pid for task in step.tasks)])
    while step.running:
        told = signal.sigtimedwait(_SIGNALS, _POLL_S)
        if told and told.si_signo != signal.SIGCHLD:
            step.end()
        if controller.find() is None:
            step.kill()
        step.reap()
    end_what_is_left()
    sys.exit(step.first_failure or (0 if step.tasks else 128 + signal.SIGTERM))


def end_what_is_left(timeout_s: float = _GRACE_S) -> None:
    """Ends the tasks' remaining descendants, in whatever session."""
    deadline = time.monotonic() + timeout_s
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        while _reap():
            pass
        time.sleep(_POLL_S / 5)


def record_processes(path: Path, pids: Sequence[int]) -> None:
    """Records process ids with start times, since ids are reused."""
    processes = []
    for pid in pids:
        try:
            processes.append(asdict(ProcessId.of(pid)))
        except psutil.NoSuchProcess:
            continue
    write_json(path, {"processes": processes})


def _start(
    rank: int, args: argparse.Namespace, signals: Iterable[int]
) -> "subprocess.Popen[bytes]":
    """Starts a task; `signals` were blocked before ours."""

    # submitit's LocalJobEnvironment reads these names.
    environment = os.environ | {
        "SUBMITIT_LOCAL_JOB_ID": args.job_id,
        "SUBMITIT_LOCAL_NTASKS": str(args.tasks),
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_GLOBALID": str(rank),
        "SUBMITIT_LOCAL_LOCALID": str(rank),
        "CUDA_VISIBLE_DEVICES": ",".join(_gpus(args.first_gpu, args.gpus)),
    }
    output, error = (name.replace("%t", str(rank)) for name in (args.output, args.error))
    with Path(output).open("ab") as stdout, Path(error).open("ab") as stderr:
        return subprocess.Popen(
            args.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=lambda: _begin(signals),
        )


def _gpus(first: int, count: int) -> list[str]:
    """Returns this component's share of the visible GPUs.

    A missing one is written as -1, which matches none, so the task notices.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(first + count)]
    return [*names, *["-1"] * (first + count)][first : first + count]


def _begin(signals: Iterable[int]) -> None:
    """Runs in a task before its command: dies with its parent, and unblocks signals."""
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--first-gpu", type=int, default=0)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--controller", type=int, required=True, help="end when this process ends")
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--processes", type=Path, required=True, help="record of who runs")
    parser.add_argument("--output", required=True)
    parser.add_argument("--error", required=True)
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


if __name__ == "__main__":
    main()
