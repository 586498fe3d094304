"""Watches one task from outside of its interpreter: names what hangs, and ends it.

    python -m relax_hpc.hangs.watchdog ORDERS

It is a process of its own, started by the task, and ends with it. It reads the task's sign of life
(`relax_hpc.heartbeat`) from memory. A task hangs whose sign of life is older than its limit, unless
it waits for others, and one that somebody has stopped. What is known of it is written first: a
storage that stands still holds that up as well, and a task that goes on afterwards is left alone.
"""

import json
import math
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from relax_hpc import permissions, storage
from relax_hpc.hangs import process, recorder
from relax_hpc.hangs.doing import Doing, Record
from relax_hpc.hangs.process import Facts
from relax_hpc.heartbeat import BYTES, Beat
from relax_hpc.parentage import end_with_parent
from relax_hpc.paths import RunPaths
from relax_hpc.records import write_json
from relax_hpc.storage import names
from relax_hpc.telemetry.events import EventWriter

_POLL_S = 1.0
_SETTLE_S = 10.0
"""Longest time that the other ranks have to say that they hang, too."""
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that Slurm sends to all processes of a step; the task says what becomes of it."""


@dataclass(frozen=True, slots=True)
class Orders:
    """The task to watch, as it tells its watchdog."""

    run_dir: str
    component: str
    rank: int
    start_id: str
    node: str
    is_one_world: bool
    """Whether the ranks of the component wait for each other."""
    pid: int
    memory: int
    """File descriptor of the sign of life."""
    stacks: int
    """File descriptor to which the task writes its stacks."""
    least_s: float
    """Limit of a phase that is known to be short, and of a stop."""
    recorder: str = ""
    """Pipe of NCCL's flight recorder, without the rank; empty if there is none."""

    @property
    def task(self) -> str:
        return f"{self.component}-{self.rank}"


class Suspicion(NamedTuple):
    """A task that seems to hang, as other watchdogs read it."""

    rank: int
    is_stopped: bool
    waits_for_others: bool
    counter: int

    @property
    def guilt(self) -> tuple[bool, bool, int, int]:
        """Smaller is guiltier: stopped, not waiting for other ranks, least signs of life."""
        return (not self.is_stopped, self.waits_for_others, self.counter, self.rank)


class Watchdog:
    """The watch over one task."""

    def __init__(
        self, orders: Orders, log: Path, folder: Path, events: EventWriter, doing: Record
    ) -> None:
        """Begins at once.

        Args:
            orders: whom to watch.
            log: file for what is found.
            folder: where the watchdogs of one start of a component leave word.
            events: of the task.
            doing: is told now and then what the task does.
        """
        self._orders, self._log, self._folder, self._events = orders, log, folder, events
        self._doing = doing
        self._memory = mmap.mmap(orders.memory, BYTES)
        self._fd = os.pidfd_open(orders.pid)
        self._poll_s = min(_POLL_S, orders.least_s / 10)
        self._looked = self._running = time.monotonic()
        self._stopped: float | None = None
        """Time at which the task was first seen stopped; None while it is not."""
        self._taken_up = (-1, 0.0)
        """Counter of the sign of life that was taken up last, and when."""

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
        orders, silent_s = self._orders, round(self._silent_s(beat), 1)
        return Doing(
            orders.component, orders.rank, orders.node, beat.phase, beat.step, silent_s, time.time()
        )

    def _has_ended(self, wait_s: float) -> bool:
        return bool(select.select([self._fd], [], [], wait_s)[0])

    def _look(self) -> tuple[Beat, Facts | None]:
        facts = process.facts(self._orders.pid)
        if facts is None or not facts.is_stopped:
            self._stopped = None
        elif self._stopped is None:
            self._stopped = time.monotonic()
        return Beat.read(self._memory), facts

    def _silent_s(self, beat: Beat) -> float:
        """Seconds without a sign of life; of a task that is stopped, since then."""
        since = max(beat.since, self._running) if self._stopped is None else self._stopped
        return time.monotonic() - since

    def _limit_s(self, beat: Beat) -> float:
        if self._stopped is not None:
            return self._orders.least_s
        return math.inf if beat.waits else beat.limit_s

    def _hangs(self, beat: Beat) -> bool:
        return self._silent_s(beat) > self._limit_s(beat)

    def _take_up(self, beat: Beat, facts: Facts) -> None:
        """Writes down what is known of a task that seems to hang, and ends it if it does."""
        limit_s, stopped = self._limit_s(beat), self._stopped
        stacks = "" if facts.is_stopped else self._stacks()
        waits = process.waits_for_others(stacks)
        mine = Suspicion(self._orders.rank, facts.is_stopped, waits, beat.counter)
        self._write(self._headline(beat, facts), facts, stacks)
        if self._orders.recorder:
            recorder.ask(self._orders.recorder, self._orders.rank)
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
        """Does not end with the task for the length of the block."""
        end_with_parent(0)
        try:
            yield
        finally:
            end_with_parent(signal.SIGKILL)

    def _is_culprit(self, mine: Suspicion) -> bool:
        """Whether this rank is to be ended: it waits for nobody, and no other is guiltier."""
        if mine.waits_for_others and not mine.is_stopped:
            return False
        return all(mine.guilt <= other.guilt for other in self._suspects())

    def _stacks(self, *, wake: bool = False, every: bool = False) -> str:
        orders = self._orders
        return process.python_stacks(orders.pid, orders.stacks, wake=wake, every=every)

    def _headline(self, beat: Beat, facts: Facts) -> str:
        how = f", stopped (state {facts.state})" if facts.is_stopped else f", state {facts.state}"
        where = f" in {facts.channel}" if facts.channel else ""
        at = f" of step {beat.step}" if beat.step else ""
        return (
            f"hangs in phase {beat.phase}{at} for {self._silent_s(beat):.0f} s"
            f" on {self._orders.node}{how}{where}"
        )

    def _write(self, headline: str, facts: Facts | None, stacks: str) -> None:
        lines = [
            f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self._orders.task} (pid {self._orders.pid}) "
            f"{headline}",
            *([facts.command] if facts else []),
            *(["kernel stack:", facts.kernel_stack] if facts and facts.kernel_stack else []),
            stacks or "no Python stacks: the process does not run",
        ]
        with suppress(OSError):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a") as file:
                file.write("\n".join(lines) + "\n\n")

    def _tell_others(self, mine: Suspicion | None) -> None:
        """Tells the watchdogs of the other ranks; None takes it back."""
        path = self._folder / f"{self._orders.rank}.json"
        if not self._orders.is_one_world:
            return
        with suppress(OSError):
            path.unlink(missing_ok=True)
            if mine is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_json(path, mine._asdict())

    def _suspects(self) -> list[Suspicion]:
        """All ranks that seem to hang in this start of the component."""
        found = []
        for name in names(self._folder):
            with suppress(OSError, ValueError, TypeError):
                found.append(Suspicion(**json.loads((self._folder / name).read_text())))
        return found


def main() -> None:
    """Runs until the task has ended."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    orders = Orders(**json.loads(sys.argv[1]))
    end_with_parent(signal.SIGKILL)
    if os.getppid() != orders.pid:  # it died before the call above
        return
    paths = RunPaths(Path(orders.run_dir))
    storage.settle()
    permissions.adopt(paths.root)
    storage.settle(_SETTLE_S, reserve=paths.reserve)
    name, rank = orders.component, orders.rank
    with EventWriter(paths.events(name, rank), name, rank) as events:
        log, folder = paths.log("hang", orders.task), paths.hangs(orders.start_id)
        doing = Record(paths.doing / f"{orders.task}.json")
        Watchdog(orders, log, folder, events, doing).watch()


if __name__ == "__main__":
    main()
