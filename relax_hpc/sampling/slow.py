"""Engines that sample much slower than the others: a hot GPU, a neighbour, a lame disk."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from relax_hpc.engines.pool_engine import EngineLoad

_SLOW, _FEWEST = 0.5, 3
_WINDOW_S, _LEAST_S = 60.0, 30.0
REST_S = 600.0
"""Seconds for which a slow engine is asked nothing new; then it is tried again."""


class Found(NamedTuple):
    """An engine that is slow."""

    id: str
    rate: float
    """Tokens per second and request."""
    median: float
    """The median engine's."""


def slow(rates: Mapping[str, float]) -> list[Found]:
    """Finds those below half of the median; of two engines nobody can say which is slow.

    Args:
        rates: tokens per second and request of each engine.
    """
    if len(rates) < _FEWEST:
        return []
    middle = median(rates.values())
    return [Found(name, rate, middle) for name, rate in rates.items() if rate < _SLOW * middle]


class _Look(NamedTuple):
    """The work of an engine since the look before."""

    time: float
    num_tokens: int
    busy_s: float
    """Seconds by requests in flight."""


class SlowEngines:
    """Looks at loads again and again, and lets engines rest that are slow for a minute."""

    def __init__(self) -> None:
        self._looks: dict[str, deque[_Look]] = {}
        self._before: dict[str, EngineLoad] = {}
        self._at = time.monotonic()
        self._until: dict[str, float] = {}

    @property
    def resting(self) -> frozenset[str]:
        """Engines that are to be asked nothing new."""
        return frozenset(self._until)

    def look(self, loads: Sequence["EngineLoad"]) -> list[Found]:
        """Takes the loads of now. Returns the engines that rest from now on."""
        now = time.monotonic()
        for load in loads:
            self._note(load, now)
        self._before, self._at = {load.id: load for load in loads}, now
        self._until = {id: at for id, at in self._until.items() if at > now and id in self._before}
        found = [each for each in slow(self._rates(now)) if each.id not in self._until]
        for each in found:
            self._until[each.id] = now + REST_S
            del self._looks[each.id]
        return found

    def _note(self, load: "EngineLoad", now: float) -> None:
        before = self._before.get(load.id)
        new = load.counts.num_tokens - (before.counts.num_tokens if before else 0)
        if before is None or new < 0:  # it is there for the first time, or was started again
            self._looks.pop(load.id, None)
            return
        busy_s = (now - self._at) * (before.in_flight + load.in_flight) / 2
        self._looks.setdefault(load.id, deque()).append(_Look(now, new, busy_s))

    def _rates(self, now: float) -> dict[str, float]:
        """Rates of engines that had work for half of the last minute."""
        rates = {}
        for name in self._before:
            looks = self._looks.get(name, deque())
            while looks and looks[0].time <= now - _WINDOW_S:
                looks.popleft()
            busy_s = sum(look.busy_s for look in looks)
            if looks and now - looks[0].time >= _LEAST_S and busy_s >= _LEAST_S:
                rates[name] = sum(look.num_tokens for look in looks) / busy_s
        return rates
