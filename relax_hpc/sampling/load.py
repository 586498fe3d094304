"""The load of a pool's engines, by one of those who ask them."""

import time
from collections.abc import Sequence

from relax_hpc.engines.pool import EngineLoad
from relax_hpc.telemetry.events import EventWriter

LOAD_EVERY_S = 5.0
"""Seconds between two `load` events of an engine."""


class LoadMeter:
    """A meter that writes down what engines did since the last time."""

    def __init__(self, events: EventWriter, *, every_s: float = LOAD_EVERY_S) -> None:
        self._events, self._every_s = events, every_s
        self._since = time.monotonic()
        self._num_tokens: dict[str, int] = {}

    def note(self, loads: Sequence[EngineLoad], *, last: bool = False) -> None:
        """Writes a `load` event per engine, if it is time to or there is no other time."""
        seconds = time.monotonic() - self._since
        if seconds < self._every_s and not last:
            return
        for load in loads:
            # An engine that was started again counts from 0.
            before = self._num_tokens.get(load.id, 0)
            new = load.num_tokens - (before if before <= load.num_tokens else 0)
            self._events.emit("load", seconds=seconds, **load._asdict() | {"num_tokens": new})
        self._num_tokens = {load.id: load.num_tokens for load in loads}
        self._since = time.monotonic()
