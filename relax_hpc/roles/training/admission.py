"""Admission of a step: none is started that the job's time limit would cut off."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

log = logging.getLogger(__name__)

MARGIN_S = 30.0
"""Seconds for rollout to keep what it has, and for Slurm to hear of it."""
_REMEMBERED = 100
_QUANTILE = 0.95


class JobEnd(Protocol):
    """The end of the allocation that a task runs in."""

    @property
    def ahead_s(self) -> float:
        """Seconds before it at which Slurm announces it, and a step that is not done is cut off."""
        ...

    def left_s(self) -> float | None:
        """Seconds until the first of the job's components ends; None while nobody has said."""
        ...

    def announce(self) -> None:
        """Announces the end of the job as Slurm does, but sooner: it is requeued once all have
        saved."""
        ...


class Admission:
    """Rank 0's look at the clock, between steps and while a batch is waited for.

    Args:
        end: of the job.
        save_times: tells the seconds of all saves so far.
        critic_save_s: tells the seconds that the critic needs for its save of the same step.
    """

    def __init__(
        self,
        end: JobEnd,
        save_times: Callable[[], Sequence[float]],
        critic_save_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._end, self._save_times, self._critic_save_s = end, save_times, critic_save_s
        self._step_times = deque[float](maxlen=_REMEMBERED)
        self._work_times = deque[float](maxlen=_REMEMBERED)
        """Time of each step after its batch was there, which is after the last look in it."""
        self._step, self._begun, self._looked = -1, 0.0, 0.0
        self._has_announced = False

    def consider(self, step: int) -> None:
        """Announces the end of the job, once, if the step after `step` could not be trained and
        saved before it. The first step after a start is always tried."""
        now = time.monotonic()
        if step != self._step:
            if self._step >= 0:
                self._step_times.append(now - self._begun)
                self._work_times.append(now - self._looked)
            self._step, self._begun = step, now
        self._looked = now
        if self._has_announced or not self._step_times:
            return
        step_s = high(self._step_times)
        save_s = max(high(self._save_times()), self._critic_save_s())
        after_s = max(save_s + MARGIN_S, self._end.ahead_s)
        # However long a batch was waited for, the work on it is still to come.
        needed_s = max(step_s - (now - self._begun), high(self._work_times)) + after_s
        left_s = self._end.left_s()
        if left_s is None or left_s >= needed_s:
            return
        log.info(
            "%.0f s of the job are left, step %d needs another %.0f s, with %.0f s for its save "
            "and the end: ending before it",
            left_s, step + 1, needed_s - after_s, after_s,
        )  # fmt: skip
        self._has_announced = True
        self._end.announce()


def high(seconds: Sequence[float]) -> float:
    """The 95th percentile, one of the values; 0 of none."""
    if not seconds:
        return 0.0
    return sorted(seconds)[math.ceil(_QUANTILE * len(seconds)) - 1]
