"""Records that are read again only once something in their folder has changed.

Every process of a run follows small records, and a name that is looked up costs the server of a
shared file system more than anything else: one name per engine, second and process is too many. A
folder changes when a record in it is published, and to see that takes no name: it is held open.
"""

import ctypes
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

GRAIN_S = 2.0
"""A server's clock may not tell two changes apart that are nearer: so long after one that was seen
all is read once more."""
REFRESH_S = 10.0
"""A record is read at least so often, whatever the folder says."""
TOLD_S = 120.0
"""The same once the folder has told of a change that another process made: then it tells of all."""
_AT_EMPTY_PATH, _AT_STATX_FORCE_SYNC, _STATX_MTIME_CTIME = 0x1000, 0x2000, 0xC0
_STATX_BYTES, _TIMES = 256, struct.Struct("=96xqI4xqI")
_Stamp = tuple[int, ...]


class Folder:
    """Counts the changes of the names in a folder. For all threads of a process."""

    def __init__(self, path: Path) -> None:
        """Nothing is opened before it is asked."""
        self._path, self._lock = path, threading.Lock()
        self._fd: int | None = None
        self._close: weakref.finalize[..., Folder] | None = None
        self._is_parent = False
        """Whether the folder that is held is the one in which it is missing."""
        self._count = 0
        self._stamp: _Stamp | None = None
        self._again_at = float("inf")
        self.has_told = False
        """Whether it ever changed, and not by this process."""

    def count(self) -> int:
        """A number that is another one if names may have changed since it was last asked.

        A folder that cannot be looked at may have.
        """
        with self._lock:
            stamp, now = self._look(), time.monotonic()
            if stamp is None or stamp != self._stamp:
                self._again_at = now + GRAIN_S
            elif now >= self._again_at:
                self._again_at = float("inf")
            else:
                return self._count
            self.has_told |= self._stamp is not None and stamp not in (None, self._stamp)
            self._stamp = stamp
            self._count += 1
            return self._count

    def note(self) -> None:
        """Takes note of a change that this process has made."""
        with self._lock:
            self._stamp = None

    def _look(self) -> _Stamp | None:
        try:
            stamp = None if self._fd is None else _changed_at(self._fd)
            if self._fd is None or (self._is_parent and stamp != self._stamp):
                self._let_go()
                stamp = self._open()
                if self._is_parent and self._path.exists():
                    # It was made after the look for it, and before that stamp, which knows of it.
                    self._let_go()
                    stamp = self._open()
        except OSError:  # the server has forgotten it
            self._let_go()
            return None
        return stamp

    def _open(self) -> _Stamp:
        flags, self._is_parent = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, False
        try:
            self._fd = os.open(self._path, flags)
        except FileNotFoundError:  # it comes later
            self._is_parent = True
            self._fd = os.open(self._path.parent, flags)
        self._close = weakref.finalize(self, _close, self._fd)
        return _changed_at(self._fd)

    def _let_go(self) -> None:
        if self._close is not None:
            self._close()
        self._fd = self._close = None


class Seen(Generic[T]):
    """Records of one folder by name, as they were last read.

    Args:
        folder: of the records.
        read: reads one; what comes of it must not be changed.
        refresh_s: all are read at least so often; every `TOLD_S` if the folder has told.
    """

    def __init__(
        self, folder: Path, read: Callable[[str], T], *, refresh_s: float = REFRESH_S
    ) -> None:
        self._folder, self._read, self._refresh_s = folder_at(folder), read, refresh_s
        self._lock, self._count, self._refresh_at = threading.Lock(), -1, 0.0
        self._found: dict[str, T] = {}

    def get(self, *names: str) -> list[T]:
        """The records of these names, in this order."""
        with self._lock:
            # First: what changes while they are read is read the next time.
            count, now = self._folder.count(), time.monotonic()
            if count != self._count or now >= self._refresh_at:
                at_least_s = TOLD_S if self._folder.has_told else self._refresh_s
                self._count, self._refresh_at, self._found = count, now + at_least_s, {}
            for name in names:
                if name not in self._found:
                    self._found[name] = self._read(name)
            return [self._found[name] for name in names]


def follow(path: Path, read: Callable[[], T]) -> Callable[[], T]:
    """Does as `read`, which reads a record of this path, for who asks again and again."""
    seen = Seen(path.parent, lambda _: read())
    return lambda: seen.get(path.name)[0]


@lru_cache(64)
def folder_at(path: Path) -> Folder:
    """The one of this process."""
    return Folder(path)


def _close(fd: int) -> None:
    with suppress(OSError):  # it was only looked at
        os.close(fd)


def _changed_at(fd: int) -> _Stamp:
    """Times of the last change of a folder, as the server knows them."""
    call = _statx()
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    flags = _AT_EMPTY_PATH | _AT_STATX_FORCE_SYNC
    if call is None or call(fd, b"", flags, _STATX_MTIME_CTIME, answer):
        found = os.fstat(fd)
        return found.st_ctime_ns, found.st_mtime_ns
    return _TIMES.unpack_from(answer.raw)


@lru_cache(1)
def _statx() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
