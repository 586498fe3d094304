"""The load of a pool's engines, by one of those who ask them."""

import time
from collections.abc import Sequence

from relax_hpc.engines.pool_engine import EngineLoad
from relax_hpc.engines.response import Counts
from relax_hpc.telemetry.events import EventWriter

LOAD_EVERY_S = 5.0
"""Seconds between two `load` events of an engine."""


class LoadMeter:
    """A meter that writes down what engines did since the last time."""

    def __init__(self, events: EventWriter, *, every_s: float = LOAD_EVERY_S) -> None:
        self._events, self._every_s = events, every_s
        self._since = time.monotonic()
        self._counts: dict[str, Counts] = {}

    def note(self, loads: Sequence[EngineLoad], *, last: bool = False) -> None:
        """Writes a `load` event per engine, if it is time to or there is no other time."""
        seconds = time.monotonic() - self._since
        if seconds < self._every_s and not last:
            return
        for load in loads:
            # An engine that was started again counts from 0.
            before = self._counts.get(load.id, Counts())
            if before.num_tokens > load.counts.num_tokens:
                before = Counts()
            fields = load._asdict() | load.counts.minus(before)._asdict()
            del fields["counts"]
            self._events.emit("load", seconds=seconds, **fields)
        self._counts = {load.id: load.counts for load in loads}
        self._since = time.monotonic()
