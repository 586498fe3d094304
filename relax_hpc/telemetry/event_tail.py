"""The events of a run as they are written, by whoever reads along."""

import heapq
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from relax_hpc.telemetry.events import Event, parse

MOST = 10_000
"""Events that are read at once: of a run that has gone on for weeks, all take gigabytes."""


class EventTail:
    """Reads each event once.

    Args:
        folder: of the events; it need not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sizes: dict[str, int] = {}
        """Bytes that were read, by file."""
        self.num_files = 0
        """Files that there were when it last looked."""
        self._left: Iterator[Event] | None = None

    @property
    def is_behind(self) -> bool:
        """Whether there were more events than were given last."""
        return self._left is not None

    def read(self) -> list[Event]:
        """The events that came since it was last asked, in order of time, `MOST` at most; none if
        nothing came.

        A line is read once it is complete.
        """
        found = list[Event]()
        if self._left is not None:
            found = list(islice(self._left, MOST))
        if not found:
            files = sorted(self._folder.glob("*.jsonl"))
            self.num_files = len(files)
            self._left = heapq.merge(*map(self._of, files), key=lambda event: event["time"])
            found = list(islice(self._left, MOST))
        if len(found) < MOST:
            self._left = None
        return found

    def _of(self, path: Path) -> Iterator[Event]:
        seen = self.sizes.get(path.name, 0)
        with path.open("rb") as file:
            file.seek(seen)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.sizes[path.name] = seen = seen + len(line)
                yield from parse(line)
