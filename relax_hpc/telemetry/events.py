"""Everything that happened, one JSON line each: the truth of a run, of which every plot is a view.

One file per role and rank, appended to by that process alone. `event_table.EVENTS` declares them.

A number that is not finite is null, and `not_finite` says which fields held one, and what.
"""

import json
import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from relax_hpc.records import finite
from relax_hpc.telemetry.event_names import undeclared
from relax_hpc.telemetry.event_table import EVENTS

Event = dict[str, Any]
FREQUENT = ("load", "phases", "shard")
"""Kinds that come all the time: nearly all that a long run has are of these."""
_NEWEST_BYTES = 1 << 20


class EventWriter:
    """Appends events of one process; a later attempt of the same rank goes on in the same file.

    What storage does not take is left out, and counted: a run does not end for its diary.
    """

    def __init__(self, path: Path, role: str, rank: int) -> None:
        self._path, self._role, self._rank = path, role, rank
        self._fd = -1
        self._torn = False
        self._dropped = 0

    def emit(self, event: str, **fields: object) -> None:
        """Appends one line in one write, so a reader sees at most the last line incomplete.

        Raises:
            ValueError: the event, or one of its fields, is not declared.
        """
        if event not in EVENTS or undeclared(event, fields):
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
    """All events of a run in order of time; none where nothing has been written yet.

    A line cut short, by a kill or because it is being written right now, is left out.

    Args:
        events_dir: of the run.
        but: kinds that are left out. `FREQUENT` ones take nearly all of the time and memory.
    """
    events = [event for path in sorted(events_dir.glob("*.jsonl")) for event in _of(path, but)]
    return sorted(events, key=lambda event: event["time"])


def events_of_state(events_dir: Path) -> list[Event]:
    """The events that tell how a run is, in order of time: of `load` the newest, the other
    `FREQUENT` ones not at all."""
    newest = [event for path in sorted(events_dir.glob("*.jsonl")) for event in _newest(path)]
    loads = [event for event in newest if event["event"] == "load"]
    events = [*read_events(events_dir, but=FREQUENT), *loads]
    return sorted(events, key=lambda event: event["time"])


def _of(path: Path, but: Collection[str]) -> Iterator[Event]:
    marks = [f'"event": "{kind}"'.encode() for kind in but]
    with path.open("rb") as file:
        for line in file:
            if not any(mark in line for mark in marks):
                yield from parse(line)


def _newest(path: Path) -> list[Event]:
    """The events at the end of a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _NEWEST_BYTES))
        return parse(file.read())


def parse(data: bytes) -> list[Event]:
    """The events of some lines; what is none is left out."""
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
