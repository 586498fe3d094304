"""A look at what rollout commits, while rank 0 trains: what is skipped is replaced in time."""

import threading
import time
from typing import Protocol

LOOK_EVERY_S = 0.1
_RESTS = 10.0
"""Rest after a look, in the time that the look took: with many producers there are fewer."""


class Looks(Protocol):
    """A sequencer, as far as others than the trainer's thread ask it."""

    def look(self) -> None: ...


class Lookout:
    """Asks the sequencer to look, time and again, until it is closed or that fails."""

    def __init__(self, sequencer: Looks, *, every_s: float = LOOK_EVERY_S) -> None:
        self._sequencer, self._every_s = sequencer, every_s
        self._end = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what looking has raised."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Ends looking; on return nobody looks any more."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        took = 0.0
        while not self._end.wait(max(self._every_s, _RESTS * took)):
            begun = time.monotonic()
            try:
                self._sequencer.look()
            except Exception as error:  # noqa: BLE001 - the outermost frame of a thread
                self._failure = error
                return
            took = time.monotonic() - begun
