"""A small srun: starts the tasks of one step on this machine and ends them together.

    python -m relax_hpc.launch.local_step --tasks N --output F --error F ... -- COMMAND ...

`%t` in the log names is the task. Each task is a session of its own, so that it can be ended with
everything it started; it dies with this process, and this process ends with the job's controller.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

import psutil

from relax_hpc.launch.process_id import ProcessId
from relax_hpc.records import write_json

_POLL_S = 0.05
_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass
class Step:
    """The running tasks of a step."""

    tasks: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    exit_codes: dict[int, int] = field(default_factory=dict)
    """Process id -> exit code of the tasks that ended."""
    end_at: float | None = None
    """When patience with the tasks ends, once they were told to."""

    @property
    def running(self) -> "list[subprocess.Popen[bytes]]":
        return [task for task in self.tasks if task.pid not in self.exit_codes]

    def signal(self, number: int) -> None:
        """Sends a signal to the tasks themselves, as srun does."""
        for task in self.running:
            task.send_signal(number)

    def end(self) -> None:
        """Asks the tasks to end; `reap` insists after a grace period."""
        if self.end_at is None:
            self.end_at = time.monotonic() + _GRACE_S
            self.signal(signal.SIGTERM)

    def kill(self) -> None:
        for task in self.running:
            os.killpg(task.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Collects the tasks that ended, with what they left behind."""
        if self.end_at is not None and time.monotonic() > self.end_at:
            self.kill()
        for task in self.running:
            # Look without collecting: until it is collected, its id still names its own group.
            if os.waitid(os.P_PID, task.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            os.killpg(task.pid, signal.SIGKILL)
            code = task.wait()
            self.exit_codes[task.pid] = 128 - code if code < 0 else code
            if code != 0:
                self.end()


def main() -> None:
    args = _parse()
    controller = ProcessId.of(args.controller)
    step = Step()

    def forward(number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            step.signal(number)
        else:
            step.end()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, forward)
    for rank in range(args.tasks):
        if step.end_at is None:
            step.tasks.append(_start(rank, args))
    record_processes(args.processes, [os.getpid(), *(task.pid for task in step.tasks)])
    while step.running:
        if controller.find() is None:
            step.kill()
        step.reap()
        time.sleep(_POLL_S)
    sys.exit(max(step.exit_codes.values(), default=128 + signal.SIGTERM))


def record_processes(path: Path, pids: Sequence[int]) -> None:
    """Notes who runs, with start times: an id alone may name another process later."""
    processes = []
    for pid in pids:
        try:
            processes.append(asdict(ProcessId.of(pid)))
        except psutil.NoSuchProcess:
            continue
    write_json(path, {"processes": processes})


def _start(rank: int, args: argparse.Namespace) -> "subprocess.Popen[bytes]":
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
            preexec_fn=_die_with_parent,
        )


def _gpus(first: int, count: int) -> list[str]:
    """This component's share of the GPUs this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(first + count)]
    return names[first : first + count]


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
