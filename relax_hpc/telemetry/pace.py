"""The time that steps take, and when the last one will be done."""

import statistics
from collections import deque
from collections.abc import Mapping

RECENT = 20
"""Steps by which the pace is told, the newest."""


class PaceMeter:
    """Starts with the first step in view, which is not like the others and does not count."""

    def __init__(self) -> None:
        self._recent = deque[float](maxlen=RECENT)
        self._is_first = True

    def end_step(self, seconds: float, steps_left: int) -> float | None:
        """Returns the seconds until the last step is done; None after the first one in view."""
        if self._is_first:
            self._is_first = False
            return None
        self._recent.append(seconds)
        return statistics.fmean(self._recent) * steps_left


def accounted(elapsed: float, spent: Mapping[str, float]) -> dict[str, float]:
    """`time/step`, the seconds of a step, and `time/other`, those that no phase is noted of.

    Args:
        elapsed: seconds from the begin of the step.
        spent: its fields; those of phases begin with `time/`.
    """
    known = sum(seconds for name, seconds in spent.items() if name.startswith("time/"))
    return {"time/other": max(elapsed - known, 0.0), "time/step": elapsed}
