"""Stopwatches for the parts of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from relax_hpc.runtime import heartbeat

_SHORTEST_S = 1e-3


class Phase(NamedTuple):
    """A process's work of one kind during an interval."""

    name: str
    start: float
    """Seconds since the epoch."""
    seconds: float


class Timers:
    """`with timers("train"): ...` adds to `time/train`, in seconds, and notes the interval.

    The task's heartbeat reports the phase, too (`relax_hpc.runtime.heartbeat`).
    """

    def __init__(self, step: int = 0) -> None:
        if step:
            heartbeat.at_step(step)
        self._begin = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.phases: list[Phase] = []
        """Phases in order, without those too short to be seen in a picture."""

    @property
    def elapsed(self) -> float:
        """Seconds since the timers were made."""
        return time.perf_counter() - self._begin

    @contextmanager
    def __call__(self, name: str, *, waits: bool = False) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            with heartbeat.phase(name, waits=waits):
                yield
        finally:
            self.add(name, begin)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Notes only the interval, for work that is measured more precisely elsewhere."""
        begin = time.perf_counter()
        try:
            with heartbeat.phase(name):
                yield
        finally:
            self._note(name, time.perf_counter() - begin)

    def add(self, name: str, begin: float) -> None:
        """Adds a phase that began at `begin` of `time.perf_counter` and ends now."""
        seconds = time.perf_counter() - begin
        key = f"time/{name}"
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds
        self._note(name, seconds)

    def _note(self, name: str, seconds: float) -> None:
        if seconds >= _SHORTEST_S:
            self.phases.append(Phase(name, time.time() - seconds, seconds))

    def __str__(self) -> str:
        return " ".join(f"{k.removeprefix('time/')} {v:.1f}" for k, v in self.seconds.items())
