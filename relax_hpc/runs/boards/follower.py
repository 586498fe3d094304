"""Draws a run while it runs: `python -m relax_hpc.runs.boards.follower RUN_DIR ...`.

The job script starts it on the first node. It only reads the run directory; a run goes on without
it, and `finish` draws the rest.
"""

import argparse
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_hpc.config.run import JobConfig
    from relax_hpc.runtime.paths import RunPaths
    from relax_hpc.runtime.telemetry.events import Event

_EVERY_S, _END_S = 2.0, 60.0
"""Least seconds between looks; limit for the last one."""
_PER_FILE_S, _MOST_S = 1.0, 120.0
"""Mean seconds between opening two files; most seconds between looks."""
_OVER, _FAILED = signal.SIGUSR1, signal.SIGUSR2
"""Signals of the job script after success, or failure."""

log = logging.getLogger(__name__)


class _EndWaiter:
    """Waits for the script's signal that the run is over."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self.failed = True
        """Default, if the script was killed before its signal."""
        self._is_limited = False
        signal.signal(_OVER, self._hear)
        signal.signal(_FAILED, self._hear)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Slurm signals everybody when a job is cancelled, and the tasks still have words to say
            signal.signal(number, _go_on)

    def wait(self, seconds: float) -> bool:
        return self._told.wait(seconds)

    def limit(self) -> None:
        """Ends this process soon: an unresponsive service must not keep the job's nodes."""
        if not self._is_limited:
            self._is_limited = True
            threading.Timer(_END_S, os._exit, [1]).start()

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.failed = number == _FAILED
        self.limit()  # first: `set` waits for ever where the signal came in the midst of `wait`
        self._told.set()


def main() -> None:
    end, args = _EndWaiter(), _parse()
    from relax_hpc.config import job_file
    from relax_hpc.runs.boards.export import Export
    from relax_hpc.runs.boards.run_board import Board, RunBoard
    from relax_hpc.runtime.process import ProcessId
    from relax_hpc.runtime.telemetry import logs

    paths, config = job_file.enter_run(args.run_dir)
    logs.setup_beside_script("boards", logging.WARNING)
    if os.getppid() != args.controller:  # it has ended already
        return
    controller = ProcessId.of(args.controller)
    board: Board
    if args.to == "tensorboard":
        board = RunBoard(paths, config)
    else:
        board = Export(paths, config, args.to, offline=config.boards.advanced.offline)
    tell = _teller(paths, config, args.job_id) if args.to == "tensorboard" else _say_nothing
    next_look = 0.0
    while not end.wait(_EVERY_S) and controller.find():
        if time.monotonic() < next_look:
            continue
        while events := board.update():
            tell(events)
        next_look = time.monotonic() + pause_s(board.num_files)
    end.limit()
    board.end(failed=end.failed)
    sys.stdout.flush()
    os._exit(0)


def pause_s(num_files: int) -> float:
    """Seconds until the next look; each file is a request to the file server."""
    return min(num_files * _PER_FILE_S, _MOST_S)


def _teller(paths: "RunPaths", config: "JobConfig", job_id: str) -> "Callable[[list[Event]], None]":
    """Returns a function that notifies the owner of new events, in its own thread."""
    from relax_hpc.launch import requeue
    from relax_hpc.runs.boards import notify

    watch = notify.ProgressWatch(
        notify.Notifier(paths, config), config.notify.advanced.plateau_steps
    )
    comment = notify.Comment(job_id)
    to_come: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()

    def work() -> None:
        watch.begin(requeue.num_restarts())
        while True:
            events = to_come.get()
            watch.take(events)
            if steps := [event for event in events if event["event"] == "step"]:
                comment.show(steps[-1], config.num_steps)

    threading.Thread(target=work, daemon=True).start()
    return to_come.put


def _say_nothing(_: "list[Event]") -> None:
    """Does nothing: the process that draws TensorBoard notifies the owner."""


def _go_on(_number: int, _frame: FrameType | None) -> None:
    """A handler instead of SIG_IGN, which children would inherit."""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--to", default="tensorboard", help="or a service")
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--controller", type=int, required=True, help="end when this process ends")
    return parser.parse_args()


if __name__ == "__main__":
    main()
