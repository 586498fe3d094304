"""The present work of every task of a run: a small file each, which a watchdog writes over."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

EVERY_S = 30.0
_STALE_S = 3 * EVERY_S
_BYTES = 512


class Doing(NamedTuple):
    """The work of a task, as it was at some time."""

    component: str
    rank: int
    node: str
    phase: str
    step: int
    """0 outside of steps."""
    seconds: float
    """Since its last sign of life."""
    time: float
    """Time of this record, seconds since 1970."""


class Record:
    """The file of one task. It is opened once and stays as long as it is: no name is looked up, and
    no room is taken.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, -1
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def write(self, doing: Doing) -> None:
        """Replaces what it says; storage that does not take it is asked again later."""
        self._next = time.monotonic() + EVERY_S
        text = json.dumps(doing._asdict()).encode()
        with suppress(OSError):
            if self._fd < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.pwrite(self._fd, text.ljust(_BYTES), 0)


def read(folder: Path) -> list[Doing]:
    """The work of all tasks whose watchdogs have written lately, by component and rank."""
    found = []
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, TypeError):  # one that is being written
            doing = Doing(**json.loads(path.read_bytes()))
            if time.time() - doing.time < _STALE_S:
                found.append(doing)
    return sorted(found)
