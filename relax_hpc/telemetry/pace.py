"""The time that steps take, and when the last one will be done."""

import time
from typing import NamedTuple


class Pace(NamedTuple):
    seconds: float
    """Seconds since the step before, or since the start."""
    eta_s: float | None
    """None after the first step: it is not like the others."""


class PaceMeter:
    """Starts with the first step in view."""

    def __init__(self) -> None:
        self._first_step: int | None = None
        self._start = self._last = time.monotonic()

    def end_step(self, step: int, num_steps: int) -> Pace:
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        if self._first_step is None:
            self._first_step, self._start = step, now
            return Pace(seconds, None)
        pace = (now - self._start) / (step - self._first_step)
        return Pace(seconds, pace * (num_steps - step))
