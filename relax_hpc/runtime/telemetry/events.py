"""Writes and reads the events of a run: one JSON line each, from which every plot is made.

Each process appends to one file, by role and rank. `event_table.EVENTS` declares the events. A
non-finite number is null; `not_finite` names such fields with their value.
"""

import heapq
import json
import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Self

from relax_hpc.runtime.files.records import finite
from relax_hpc.runtime.telemetry.event_table import EVENTS, find_undeclared

Event = dict[str, Any]
FREQUENT = ("load", "phases", "shard", "waits")
"""Frequent kinds, which make up nearly all of a long run's events."""
_NEWEST_BYTES = 1 << 20


class EventWriter:
    """Appends events of one process; a later attempt of the same rank continues the same file.

    Events that storage refuses are dropped and counted: a run does not end for its log.
    """

    def __init__(self, path: Path, role: str, rank: int) -> None:
        self._path, self._role, self._rank = path, role, rank
        self._fd = -1
        self._torn = False
        self._dropped = 0

    @property
    def rank(self) -> int:
        return self._rank

    def emit(self, event: str, **fields: object) -> None:
        """Appends one line in one write, so a reader sees at most the last line incomplete.

        Raises:
            ValueError: the event, or one of its fields, is not declared.
        """
        if event not in EVENTS or find_undeclared(event, fields):
            raise ValueError(f"event_table.EVENTS does not declare {event}: {', '.join(fields)}")
        record = {"time": time.time(), "role": self._role, "rank": self._rank, "pid": os.getpid()}
        record |= {"event": event} | fields
        try:
            text = json.dumps(record, default=_plain, allow_nan=False)
        except ValueError:
            said, odd = finite(record, _plain)
            text = json.dumps(said | {"not_finite": odd}, allow_nan=False)
        self._write(text)
        if self._dropped and not self._torn:
            dropped, self._dropped = self._dropped, 0
            self.emit("events_dropped", number=dropped)

    def close(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)

    def _write(self, text: str) -> None:
        try:
            if self._fd < 0:
                self._open()
            line = b"\n" * self._torn + text.encode() + b"\n"
            whole = os.write(self._fd, line) == len(line)
            self._torn = not whole
        except OSError:
            self.close()  # the server may have forgotten it
            self._fd, whole = -1, False
        self._dropped += not whole

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._fd, size = fd, os.fstat(fd).st_size
        # An attempt that was killed may have left half a line; do not continue it.
        self._torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_events(events_dir: Path, *, but: Collection[str] = ()) -> list[Event]:
    """Reads all events of a run in order of time; empty before the first.

    Skips incomplete lines, cut by a kill or still being written.

    Args:
        but: kinds to skip. `FREQUENT` ones take nearly all of the time and memory.
    """
    events = [event for path in sorted(events_dir.glob("*.jsonl")) for event in _of(path, but)]
    return sorted(events, key=lambda event: event["time"])


def events_of_state(events_dir: Path) -> list[Event]:
    """Reads the events for a run's status, in order of time: only the newest `load`, and no other
    `FREQUENT` ones."""
    found = [event for path in sorted(events_dir.glob("*.jsonl")) for event in read_newest(path)]
    loads = [event for event in found if event["event"] == "load"]
    events = [*read_events(events_dir, but=FREQUENT), *loads]
    return sorted(events, key=lambda event: event["time"])


def _of(path: Path, but: Collection[str]) -> Iterator[Event]:
    marks = [f'"event": "{kind}"'.encode() for kind in but]
    with path.open("rb") as file:
        for line in file:
            if not any(mark in line for mark in marks):
                yield from parse(line)


def read_newest(path: Path, nbytes: int | None = None) -> list[Event]:
    """Reads the events at the end of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (nbytes or _NEWEST_BYTES)))
            return parse(file.read())
    except OSError:
        return []


def parse(data: bytes) -> list[Event]:
    """Parses lines; skips invalid ones."""
    events = []
    for line in data.split(b"\n"):
        try:
            event = json.loads(line, parse_constant=lambda _: None)
        except ValueError:
            continue
        if isinstance(event, dict) and "time" in event and "event" in event:
            events.append(event)
    return events


def _plain(value: object) -> object:
    item = getattr(value, "item", None)  # NumPy and torch scalars
    return item() if callable(item) else str(value)


MOST = 10_000
"""Events per read: all events of a run of weeks take gigabytes."""


class EventTail:
    """Reads each event once.

    Args:
        folder: of the events; it need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sizes: dict[str, int] = {}
        """Bytes read, by file."""
        self.num_files = 0
        """Number of files at the last look."""
        self._left: Iterator[Event] | None = None

    @property
    def is_behind(self) -> bool:
        """Whether there were more events than the last read returned."""
        return self._left is not None

    def read(self) -> list[Event]:
        """Returns the events since the last call, in order of time, at most `MOST`.

        Leaves incomplete lines for later.
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
