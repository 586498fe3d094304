"""Whether an engine still answers, asked beside whatever else its owner does."""

import threading
import time
from typing import Self

from relax_hpc.engines.http import Http
from relax_hpc.errors import EngineLostError


class Pulse:
    """Asks a question that the engine's scheduler has to answer: its HTTP server may live on
    beside a scheduler that hangs. One question at a time, so that a slow engine is not flooded.
    """

    def __init__(self, url: str, token: str, *, every_s: float, timeout_s: float) -> None:
        """Starts asking.

        Args:
            url: "http://host:port".
            token: bearer token.
            every_s: between an answer and the next question.
            timeout_s: of one question; a stalled connection is given up for a new one.
        """
        self._http = Http(url, token, timeout_s=timeout_s)
        self._every_s, self._answered = every_s, time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name=f"pulse of {url}", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer, or since it was excused."""
        return time.monotonic() - self._answered

    def excuse(self) -> None:
        """Counts silence anew, since it is known why the engine does not answer now."""
        self._answered = time.monotonic()

    def close(self) -> None:
        """Does not wait for an answer that is still out."""
        self._over.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self) -> None:
        with self._http:
            while not self._over.wait(self._every_s):
                try:
                    self._http.status("GET", "/server_info")
                except EngineLostError:
                    continue
                self._answered = time.monotonic()
