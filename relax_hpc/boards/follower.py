"""The process that draws a run while it runs: `python -m relax_hpc.boards.follower RUN_DIR ...`.

The job script starts it beside the components, on the first node. It only reads what others leave
in the run directory; a run goes on without it, and `finish` draws what it did not.
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
    from relax_hpc.paths import RunPaths
    from relax_hpc.telemetry.events import Event

_EVERY_S, _END_S = 2.0, 60.0
"""Seconds between looks, at least; for the last of them."""
_PER_FILE_S, _MOST_S = 1.0, 120.0
"""Seconds between two files that are opened, on average; between looks, at most."""
_OVER, _FAILED = signal.SIGUSR1, signal.SIGUSR2
"""Signals of the job script once all components have ended: well, or otherwise."""

log = logging.getLogger(__name__)


class _End:
    """Waits for the script's word that the run is over."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self.failed = True
        """Also where the script was killed before it could say anything."""
        self._is_limited = False
        signal.signal(_OVER, self._hear)
        signal.signal(_FAILED, self._hear)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Slurm signals everybody when a job is cancelled, and the tasks still have words to say
            signal.signal(number, _go_on)

    def wait(self, seconds: float) -> bool:
        return self._told.wait(seconds)

    def limit(self) -> None:
        """Ends this process soon: a service that does not answer must not keep the job's nodes."""
        if not self._is_limited:
            self._is_limited = True
            threading.Timer(_END_S, os._exit, [1]).start()

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.failed = number == _FAILED
        self.limit()  # first: `set` waits for ever where the signal came in the midst of `wait`
        self._told.set()


def main() -> None:
    end, args = _End(), _parse()
    from relax_hpc import job_file, permissions, storage
    from relax_hpc.boards.export import Export
    from relax_hpc.boards.run_board import RunBoard
    from relax_hpc.comm.process_id import ProcessId
    from relax_hpc.paths import RunPaths

    storage.settle()
    paths = RunPaths(args.run_dir)
    permissions.enter(paths)
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stdout,  # the log of the job script
        format="%(asctime)s boards: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    if os.getppid() != args.controller:  # it has ended already
        return
    controller = ProcessId.of(args.controller)
    config = job_file.read_resolved(paths.config)
    storage.settle(config.launch.peer_timeout_s, reserve=paths.reserve)
    board: RunBoard | Export
    if args.to == "tensorboard":
        board = RunBoard(paths, config)
    else:
        board = Export(paths, config, args.to, offline=config.boards.offline)
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
    """Seconds until the next look at so many files, of each of which the server is asked."""
    return min(num_files * _PER_FILE_S, _MOST_S)


def _teller(paths: "RunPaths", config: "JobConfig", job_id: str) -> "Callable[[list[Event]], None]":
    """A function of new events that has the owner told of them, in a thread of its own."""
    from relax_hpc.boards import notify
    from relax_hpc.launch import requeue

    watch = notify.Watch(notify.Notifier(paths, config), config.notify.plateau_steps)
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
    """Says nothing: the process that draws TensorBoard tells the owner."""


def _go_on(_number: int, _frame: FrameType | None) -> None:
    """A handler, and not SIG_IGN, which children would inherit."""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--to", default="tensorboard", help="or a service")
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--controller", type=int, required=True, help="end when this process ends")
    return parser.parse_args()


if __name__ == "__main__":
    main()
