"""Watches one task from outside its interpreter: names what hangs, and ends it.

    python -m relax_hpc.runtime.watchdog ORDERS

The task starts this process by `watch`. It ends with the task, and reads its `heartbeat` from
shared memory. A task hangs if its heartbeat is older than the limit and it does not wait for
others, or if somebody stopped it. The watchdog first writes a report; if storage blocks that and
the task recovers meanwhile, it is left alone.

NCCL's flight recorder keeps the last collectives of a rank in memory. A thread of torch writes them
to a file, without the interpreter's lock or the GPU, when a collective fails or a pipe is written.
"""

import json
import math
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from relax_hpc.runtime import heartbeat, process
from relax_hpc.runtime.files import permissions, storage
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.files.scratch import scratch_folder
from relax_hpc.runtime.files.storage import names
from relax_hpc.runtime.heartbeat import Beat, Doing, DoingFile
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.process import ProcessFacts, end_with, end_with_parent
from relax_hpc.runtime.telemetry.events import EventWriter

_ENTRIES = 2000
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


@contextmanager
def configure(environment: MutableMapping[str, str], folder: Path, dump: Path) -> Iterator[str]:
    """Turns on the flight recorder for the length of the block, unless the environment decides;
    call it before the first group is made.

    Args:
        environment: of this process.
        folder: on this node, for pipes.
        dump: output file; torch appends the rank.

    Yields:
        The pipe's name, to which torch appends the rank, too.
    """
    wanted = {
        "TORCH_FR_BUFFER_SIZE": str(_ENTRIES),
        "TORCH_FR_DUMP_TEMP_FILE": str(dump),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        _PIPE: str(folder / "rank-"),
    }
    ours = {name: value for name, value in wanted.items() if name not in environment}
    environment.update(ours)
    try:
        yield environment[_PIPE]
    finally:
        for name in ours:
            environment.pop(name, None)


def ask(pipe: str, rank: int) -> None:
    """Makes a rank write its record within a second or two; nothing without a recorder."""
    with suppress(OSError):
        fd = os.open(f"{pipe}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fd, b"1")
        finally:
            os.close(fd)


_POLL_S = 1.0
_SETTLE_S = 10.0
"""Longest time for other ranks to report that they hang, too."""
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm sends these to all processes of a step; the task decides how to react."""


@dataclass(frozen=True, slots=True)
class Orders:
    """The task to watch."""

    run_dir: str
    component: str
    rank: int
    start_id: str
    node: str
    is_one_world: bool
    """Whether the component's ranks wait for each other."""
    pid: int
    memory: int
    """File descriptor of the heartbeat."""
    stacks: int
    """File descriptor to which the task writes its stacks."""
    least_s: float
    """Limit of a phase that is known to be short, and of a stop."""
    recorder: str = ""
    """Pipe of NCCL's flight recorder, without the rank; empty if there is none."""

    @property
    def task(self) -> str:
        return f"{self.component}-{self.rank}"


@contextmanager
def watch(
    run_dir: Path,
    component: str,
    rank: int,
    start_id: str,
    node: str,
    *,
    is_one_world: bool,
    least_s: float,
    most_s: float,
) -> Iterator[None]:
    """Runs a watchdog beside this process for the length of the block.

    Shared memory and files are unnamed, so nothing is left behind.

    Args:
        start_id: the same for all tasks of one start of the component.
        is_one_world: whether the component's ranks wait for each other.
        least_s: limit of a phase that is known to be short, and of a stop.
        most_s: limit of every phase.
    """
    shared, stacks = os.memfd_create("heartbeat"), os.memfd_create("stacks")
    os.ftruncate(shared, heartbeat.BYTES)
    orders = Orders(
        str(run_dir), component, rank, start_id, node, is_one_world, os.getpid(), shared, stacks,
        min(least_s, most_s),
    )  # fmt: skip
    with mmap.mmap(shared, heartbeat.BYTES) as memory, ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("hangs"))
        if is_one_world:
            dump = RunPaths(run_dir).collectives(start_id)
            pipe = stack.enter_context(configure(os.environ, folder, dump))
            orders = replace(orders, recorder=pipe)
        heartbeat.begin(memory, least_s=least_s, most_s=most_s)
        process.tell_stacks(stacks)
        watchdog = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, json.dumps(asdict(orders))],
            stdin=subprocess.DEVNULL,
            pass_fds=(shared, stacks),
        )
        try:
            yield
        finally:
            watchdog.kill()
            watchdog.wait()
            process.tell_no_stacks()
            heartbeat.end()
            os.close(shared)
            os.close(stacks)


class Suspicion(NamedTuple):
    """A task that seems to hang, as other watchdogs see it."""

    rank: int
    is_stopped: bool
    waits_for_others: bool
    counter: int

    @property
    def guilt(self) -> tuple[bool, bool, int, int]:
        """Sort key, guiltiest first: stopped, not waiting for other ranks, fewest beats."""
        return (not self.is_stopped, self.waits_for_others, self.counter, self.rank)


class Watchdog:
    def __init__(
        self, orders: Orders, log: Path, folder: Path, events: EventWriter, doing: DoingFile
    ) -> None:
        """Begins at once.

        Args:
            log: file for reports.
            folder: where the watchdogs of one start of a component exchange suspicions.
            doing: record of the task's work, updated now and then.
        """
        self._orders, self._log, self._folder, self._events = orders, log, folder, events
        self._doing = doing
        self._memory = mmap.mmap(orders.memory, heartbeat.BYTES)
        self._fd = os.pidfd_open(orders.pid)
        self._poll_s = min(_POLL_S, orders.least_s / 10)
        self._looked = self._running = time.monotonic()
        self._stopped: float | None = None
        """When the task was first seen stopped; None while it is not."""
        self._taken_up = (-1, 0.0)
        """The last handled beat, and when."""

    def watch(self) -> None:
        """Returns when the task has ended."""
        while not self._has_ended(self._poll_s):
            now = time.monotonic()
            if now - self._looked > 3 * self._poll_s + 2:  # stopped itself, with the whole step
                self._running, self._stopped = now, None
            self._looked = now
            beat, facts = self._look()
            if self._doing.is_due:
                self._doing.write(self._work(beat))
            if facts is None or not self._hangs(beat):
                continue
            counter, taken_up = self._taken_up
            if counter == beat.counter and now - taken_up < self._orders.least_s:
                continue
            self._taken_up = (beat.counter, now)
            self._take_up(beat, facts)
            self._looked = time.monotonic()

    def _work(self, beat: Beat) -> Doing:
        orders, seconds = self._orders, round(time.monotonic() - beat.began, 1)
        return Doing(
            orders.component, orders.rank, orders.node, beat.phase, beat.step, seconds, time.time()
        )

    def _has_ended(self, wait_s: float) -> bool:
        return bool(select.select([self._fd], [], [], wait_s)[0])

    def _look(self) -> tuple[Beat, ProcessFacts | None]:
        facts = process.facts(self._orders.pid)
        if facts is None or not facts.is_stopped:
            self._stopped = None
        elif self._stopped is None:
            self._stopped = time.monotonic()
        return Beat.read(self._memory), facts

    def _silent_s(self, beat: Beat) -> float:
        """Seconds without a beat; of a stopped task, since the stop."""
        since = max(beat.since, self._running) if self._stopped is None else self._stopped
        return time.monotonic() - since

    def _limit_s(self, beat: Beat) -> float:
        if self._stopped is not None:
            return self._orders.least_s
        return math.inf if beat.waits else beat.limit_s

    def _hangs(self, beat: Beat) -> bool:
        return self._silent_s(beat) > self._limit_s(beat)

    def _take_up(self, beat: Beat, facts: ProcessFacts) -> None:
        """Writes a report on a task that seems to hang, and ends it if it does."""
        limit_s, stopped = self._limit_s(beat), self._stopped
        stacks = "" if facts.is_stopped else self._stacks()
        waits = process.waits_for_others(stacks)
        mine = Suspicion(self._orders.rank, facts.is_stopped, waits, beat.counter)
        self._write(self._headline(beat, facts), facts, stacks)
        if self._orders.recorder:
            ask(self._orders.recorder, self._orders.rank)
        self._tell_others(mine)
        if self._has_ended(min(_SETTLE_S, limit_s / 4)):
            return
        now, facts_now = self._look()
        if facts_now is None or now.counter != beat.counter or self._stopped != stopped:
            self._tell_others(None)
            return
        ended = self._is_culprit(mine)
        with self._outliving_it():  # while it runs again for its stack, anything may end it
            if ended and facts_now.is_stopped and not stacks:
                stacks = self._stacks(wake=True)
                self._write("continued, to see where it stood", None, stacks)
            place = process.place_of(stacks)
            self._events.emit(
                "hang", phase=beat.phase, step=beat.step, seconds=round(self._silent_s(beat), 1),
                limit_s=round(limit_s, 1), state=facts.state, channel=facts.channel, place=place,
                log=str(self._log), ended=ended,
                message=self._headline(beat, facts) + f", at {place}" * bool(place),
            )  # fmt: skip
            if ended:
                self._write("all threads, at its end", None, self._stacks(every=True))
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    @contextmanager
    def _outliving_it(self) -> Iterator[None]:
        """Survives the end of the task for the length of the block."""
        end_with_parent(0)
        try:
            yield
        finally:
            end_with_parent(signal.SIGKILL)

    def _is_culprit(self, mine: Suspicion) -> bool:
        """Whether this rank must be ended: it waits for nobody, and no other is guiltier."""
        if mine.waits_for_others and not mine.is_stopped:
            return False
        return all(mine.guilt <= other.guilt for other in self._suspects())

    def _stacks(self, *, wake: bool = False, every: bool = False) -> str:
        orders = self._orders
        return process.python_stacks(orders.pid, orders.stacks, wake=wake, every=every)

    def _headline(self, beat: Beat, facts: ProcessFacts) -> str:
        how = f", stopped (state {facts.state})" if facts.is_stopped else f", state {facts.state}"
        where = f" in {facts.channel}" if facts.channel else ""
        at = f" of step {beat.step}" if beat.step else ""
        return (
            f"hangs in phase {beat.phase}{at} for {self._silent_s(beat):.0f} s"
            f" on {self._orders.node}{how}{where}"
        )

    def _write(self, headline: str, facts: ProcessFacts | None, stacks: str) -> None:
        lines = [
            f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self._orders.task} (pid {self._orders.pid}) "
            f"{headline}",
            *([facts.command] if facts else []),
            *(["kernel stack:", facts.kernel_stack] if facts and facts.kernel_stack else []),
            stacks or "no Python stacks: the process does not run",
        ]
        with suppress(OSError):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n\n")

    def _tell_others(self, mine: Suspicion | None) -> None:
        """Tells the watchdogs of the other ranks; None withdraws it."""
        path = self._folder / f"{self._orders.rank}.json"
        if not self._orders.is_one_world:
            return
        with suppress(OSError):
            path.unlink(missing_ok=True)
            if mine is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_json(path, mine._asdict())

    def _suspects(self) -> list[Suspicion]:
        """Returns all ranks that seem to hang in this start of the component."""
        found = []
        for name in names(self._folder):
            with suppress(OSError, ValueError, TypeError):
                found.append(
                    Suspicion(**json.loads((self._folder / name).read_text(encoding="utf-8")))
                )
        return found


def main() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    orders = Orders(**json.loads(sys.argv[1]))
    end_with(orders.pid)
    paths = RunPaths(Path(orders.run_dir))
    storage.settle()
    permissions.adopt(paths.root)
    storage.settle(_SETTLE_S, reserve=paths.reserve)
    name, rank = orders.component, orders.rank
    with EventWriter(paths.events(name, rank), name, rank) as events:
        log, folder = paths.log("hang", orders.task), paths.hangs(orders.start_id)
        doing = DoingFile(paths.doing / f"{orders.task}.json")
        Watchdog(orders, log, folder, events, doing).watch()


if __name__ == "__main__":
    main()
