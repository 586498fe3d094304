"""The sign of life of a task: what it does, since when, and how long that may take.

It lies in memory that the task shares with the watchdog beside it (`relax_hpc.hangs`), so it costs
microseconds, and nobody else can read it. A process that has not called `begin` has none, and
everything here does nothing.
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

BYTES = 4096
FACTOR = 5.0
"""A phase may take so many times as long as the longest that was seen."""
LEARNED_AFTER = 3
"""Times that a phase must have been seen before its limit is learned; before, it is the highest."""
_NAME = 48
_BEAT = struct.Struct(f"=Qddq?{_NAME}s")
_HOLDS = struct.Struct("=Q")
_HOLDS_AT = _BEAT.size


class Beat(NamedTuple):
    """A sign of life: the work of a task, and since when."""

    counter: int
    """Signs of life so far."""
    since: float
    """Time of the last one, of time.monotonic()."""
    limit_s: float
    """Seconds that may pass before the next one."""
    step: int
    phase: str
    waits: bool
    """Whether it waits for others, or for storage."""

    @classmethod
    def read(cls, memory: mmap.mmap) -> Self:
        """The last one; another process may be writing."""
        seen = memory[: _HOLDS_AT + _HOLDS.size]
        while (again := memory[: len(seen)]) != seen:
            seen = again
        counter, since, limit_s, step, waits, name = _BEAT.unpack_from(seen)
        (holds,) = _HOLDS.unpack_from(seen, _HOLDS_AT)
        phase = name.rstrip(b"\0").decode(errors="replace")
        return cls(counter, since, limit_s, step, phase, waits or holds > 0)


class _Seen:
    """The times that one phase took."""

    def __init__(self) -> None:
        self.count, self.longest_s = 0, 0.0


class _Heart:
    """The task's side; phases are those of the thread that began."""

    def __init__(self, memory: mmap.mmap, least_s: float, most_s: float) -> None:
        self.memory, self.least_s, self.most_s = memory, min(least_s, most_s), most_s
        self.thread, self.lock = threading.get_ident(), threading.Lock()
        self.phases: list[tuple[str, bool]] = [("start", False)]
        self.seen: dict[str, _Seen] = {}
        self.counter, self.step, self.holds = 0, 0, 0
        self.since = time.monotonic()
        self.write()

    def write(self) -> None:
        name, waits = self.phases[-1]
        seen, limit_s = self.seen.get(name), self.most_s
        # Outside all phases anything may happen.
        if seen and seen.count >= LEARNED_AFTER and len(self.phases) > 1:
            limit_s = min(max(self.least_s, FACTOR * seen.longest_s), self.most_s)
        self.counter += 1
        _BEAT.pack_into(
            self.memory, 0, self.counter, self.since, limit_s, self.step, waits,
            name.encode()[:_NAME],
        )  # fmt: skip

    def beat(self) -> None:
        now, seen = time.monotonic(), self.seen.setdefault(self.phases[-1][0], _Seen())
        seen.count, seen.longest_s = seen.count + 1, max(seen.longest_s, now - self.since)
        self.since = now


_hearts: list[_Heart] = []
"""At most one: that of the process."""


def begin(memory: mmap.mmap, *, least_s: float, most_s: float) -> None:
    """Gives this process a sign of life; the calling thread is the one that tells its phases.

    Args:
        memory: `BYTES`, shared with the watchdog.
        least_s: limit of a phase that is known to be short.
        most_s: limit of every phase.
    """
    _hearts[:] = [_Heart(memory, least_s, most_s)]


def end() -> None:
    """Takes it away again."""
    _hearts.clear()


def _own() -> _Heart | None:
    heart = _hearts[0] if _hearts else None
    return heart if heart and heart.thread == threading.get_ident() else None


@contextmanager
def phase(name: str, *, waits: bool = False) -> Iterator[None]:
    """Tells what the task does for the length of the block; within another, that one is hidden.

    Args:
        name: of what takes about the same time whenever it is done.
        waits: for others, who are to blame if it lasts. Such a wait has a bound of its own.
    """
    if (heart := _own()) is None:
        yield
        return
    heart.beat()
    heart.phases.append((name, waits))
    heart.write()
    try:
        yield
    finally:
        heart.beat()
        heart.phases.pop()
        if heart.step and len(heart.phases) == 1:
            heart.phases = [("between phases", False)]
        heart.write()


def beat() -> None:
    """Says that the task goes on, in the middle of a phase."""
    if heart := _own():
        heart.beat()
        heart.write()


def at_step(step: int) -> None:
    """Says which step the task is at."""
    if heart := _own():
        heart.step = step


@contextmanager
def hold() -> Iterator[None]:
    """Says that a thread of this process waits for storage: as long as it does, nothing hangs."""
    heart = _hearts[0] if _hearts else None
    if heart is None:
        yield
        return
    _add_hold(heart, 1)
    try:
        yield
    finally:
        _add_hold(heart, -1)


def _add_hold(heart: _Heart, number: int) -> None:
    with heart.lock:
        heart.holds += number
        _HOLDS.pack_into(heart.memory, _HOLDS_AT, heart.holds)


os.register_at_fork(after_in_child=end)
