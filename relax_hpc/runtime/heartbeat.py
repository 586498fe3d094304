"""The heartbeat of a task: its phase, since when, and how long that may take.

It lies in memory shared with the task's watchdog, so a beat costs microseconds. In a process that
has not called `begin`, beats and phases do nothing. For others than the watchdog there is a small
file per task, which the watchdog overwrites now and then.
"""

import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

BYTES = 4096
FACTOR = 5.0
"""A phase may take this many times as long as the longest seen."""
LEARNED_AFTER = 3
"""A phase's limit is learned after this many times; before, it is the highest."""
_NAME = 48
_BEAT = struct.Struct(f"=Qdddq?{_NAME}s")
_HOLDS = struct.Struct("=Q")
_HOLDS_AT = _BEAT.size


class Beat(NamedTuple):
    counter: int
    """Number of beats so far."""
    since: float
    """time.monotonic() at the last beat."""
    limit_s: float
    """Seconds that may pass before the next beat."""
    step: int
    phase: str
    """Name, or what the task said that it does in it."""
    began: float
    """time.monotonic() when that began."""
    waits: bool
    """Whether it waits for others, or for storage."""

    @classmethod
    def read(cls, memory: mmap.mmap) -> Self:
        """Reads the last beat, while another process may be writing."""
        seen = memory[: _HOLDS_AT + _HOLDS.size]
        while (again := memory[: len(seen)]) != seen:
            seen = again
        counter, since, limit_s, began, step, waits, name = _BEAT.unpack_from(seen)
        (holds,) = _HOLDS.unpack_from(seen, _HOLDS_AT)
        phase = name.rstrip(b"\0").decode(errors="replace")
        return cls(counter, since, limit_s, step, phase, began, waits or holds > 0)


class _PhaseTimes:
    """Durations of one phase."""

    def __init__(self) -> None:
        self.count, self.longest_s = 0, 0.0


class _Heart:
    """The task's side; only the thread that called `begin` has phases."""

    def __init__(self, memory: mmap.mmap, least_s: float, most_s: float) -> None:
        self.memory, self.least_s, self.most_s = memory, min(least_s, most_s), most_s
        self.thread, self.lock = threading.get_ident(), threading.Lock()
        self.phases: list[tuple[str, bool]] = [("start", False)]
        self.seen: dict[str, _PhaseTimes] = {}
        self.counter, self.step, self.holds = 0, 0, 0
        self.since = self.began = time.monotonic()
        self.said = ""
        self.write()

    def write(self) -> None:
        name, waits = self.phases[-1]
        seen, limit_s = self.seen.get(name), self.most_s
        # Outside all phases anything may happen.
        if seen and seen.count >= LEARNED_AFTER and len(self.phases) > 1:
            limit_s = min(max(self.least_s, FACTOR * seen.longest_s), self.most_s)
        self.counter += 1
        _BEAT.pack_into(
            self.memory, 0, self.counter, self.since, limit_s, self.began, self.step, waits,
            (self.said or name).encode()[:_NAME],
        )  # fmt: skip

    def say(self, what: str) -> None:
        self.said, self.began = what, time.monotonic()
        self.write()

    def beat(self) -> None:
        now, seen = time.monotonic(), self.seen.setdefault(self.phases[-1][0], _PhaseTimes())
        seen.count, seen.longest_s = seen.count + 1, max(seen.longest_s, now - self.since)
        self.since = now


_hearts: list[_Heart] = []
"""At most one: this process's."""


def begin(memory: mmap.mmap, *, least_s: float, most_s: float) -> None:
    """Starts this process's heartbeat; the calling thread reports its phases.

    Args:
        memory: `BYTES`, shared with the watchdog.
        least_s: limit of a phase that is known to be short.
        most_s: limit of every phase.
    """
    _hearts[:] = [_Heart(memory, least_s, most_s)]


def end() -> None:
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
    heart.say("")
    try:
        yield
    finally:
        heart.beat()
        heart.phases.pop()
        if heart.step and len(heart.phases) == 1:
            heart.phases = [("between phases", False)]
        heart.say("")


def beat() -> None:
    """Reports progress in the middle of a phase."""
    if heart := _own():
        heart.beat()
        heart.write()


def say(what: str) -> None:
    """Tells what the task does in its phase, whose limit stays."""
    if (heart := _own()) and heart.said != what:
        heart.say(what)


def at_step(step: int) -> None:
    if heart := _own():
        heart.step = step


@contextmanager
def hold() -> Iterator[None]:
    """Reports that a thread waits for storage: meanwhile nothing counts as hanging."""
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


EVERY_S = 30.0
_STALE_S = 3 * EVERY_S
_RECORD_BYTES = 512


class Doing(NamedTuple):
    """A task's work at some time."""

    component: str
    rank: int
    node: str
    phase: str
    step: int
    """0 outside of steps."""
    seconds: float
    """Since it began to do that."""
    time: float
    """Time of this record, seconds since 1970; by the file server's clock when read."""


class DoingFile:
    """The file of one task. It is opened once and overwritten in place: no name lookups, no new
    space."""

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, -1
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def write(self, doing: Doing) -> None:
        """Replaces the content; retries later if storage refuses."""
        self._next = time.monotonic() + EVERY_S
        text = json.dumps(doing._asdict()).encode()
        with suppress(OSError):
            if self._fd < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.pwrite(self._fd, text.ljust(_RECORD_BYTES), 0)


def read_doing(folder: Path) -> list[Doing]:
    """Reads the recent records of all tasks, by component and rank."""
    found = []
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, TypeError):  # one that is being written
            doing = Doing(**json.loads(path.read_bytes()))
            written = path.stat().st_mtime  # by the file server: clocks of nodes may differ
            if min(abs(time.time() - when) for when in (doing.time, written)) < _STALE_S:
                found.append(doing._replace(time=written))
    return sorted(found)
