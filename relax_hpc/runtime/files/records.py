"""Publishes small JSON records atomically, and rereads them only after their folder changed.

JSON has no non-finite numbers: records either hold none, or null for them.

Every process polls small records, and each name lookup costs the server of a shared file system: a
name per engine, second and process is too many. A folder changes when a record in it is published;
we hold it open and check its times, which needs no lookup.
"""

import ctypes
import errno
import json
import os
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import crc32c

from relax_hpc.runtime.files import storage

Buffer = bytes | bytearray | memoryview

_OTHER_S, _POLL_S = 5.0, 0.01
"""Seconds for another writer to publish a record that it has claimed; and between polls."""


def checksum(data: Buffer, before: int = 0) -> int:
    """CRC32C (Castagnoli) in hardware: about 10 GB/s on one core.

    Args:
        before: checksum of the preceding bytes, to continue from.
    """
    # The lock of the interpreter is always released: whoever writes beside this must not wait.
    return cast(int, crc32c.crc32c(data, before, 1))


def write_json(path: Path, record: object) -> None:
    write_text(path, json.dumps(record, indent=1, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Publishes `data` at `path`, replacing an older file.

    Readers may open the final name at any moment, so it must never name a half-written file: write
    beside it, flush to disk, then rename, which is atomic within one POSIX file system. While
    storage fails, all of it is retried with the same data.
    """
    draft = _draft_of(path)

    def publish() -> None:
        _write_draft(draft, data)
        draft.replace(path)

    try:
        storage.patiently(path, publish, small=True)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def write_json_once(path: Path, record: object) -> bool:
    """Publishes `record` unless `path` exists; returns whether it did."""
    draft = _draft_of(path)
    data = json.dumps(record, indent=1, allow_nan=False).encode()

    def publish() -> bool:
        try:
            os.link(draft, path)  # of several writers, on several nodes, one succeeds
        except FileExistsError:  # perhaps by an attempt that was said to have failed
            return draft.samefile(path)
        except OSError as error:
            if error.errno in (*storage.PASSING, *storage.FULL, errno.ENOENT):
                raise
            return _publish_by_folder(draft, data, path)  # there are no hard links here
        return True

    try:
        storage.patiently(path, lambda: _write_draft(draft, data), small=True)
        return storage.patiently(path, publish, small=True)
    finally:
        storage.delete(draft)


def retract(path: Path) -> None:
    """Removes a record of `write_json_once`, so that it can be published again."""

    def remove() -> None:
        claim, gone = _claim_of(path), _draft_of(path)
        if claim.exists():  # there are no hard links here
            claim.rename(gone)
            _delete_claim(gone)
        path.unlink(missing_ok=True)

    storage.patiently(path, remove, small=True)


def _publish_by_folder(draft: Path, data: bytes, path: Path) -> bool:
    """Publishes a draft as `os.link` does, where there are no hard links.

    A process that creates a name by O_EXCL and dies leaves an incomplete record for ever. Instead,
    one rename gives a folder with the complete record a unique name; anybody can then make the
    record at `path` from it.
    """
    claim, folder = _claim_of(path), draft.with_suffix(".once")
    try:
        folder.mkdir(exist_ok=True)
        _write_draft(folder / draft.name, data)
        try:
            if not path.exists():
                folder.rename(claim)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        is_ours = (claim / draft.name).exists()
        until = time.monotonic() + (0 if is_ours else _OTHER_S)
        while not path.exists() and time.monotonic() < until:
            time.sleep(_POLL_S)
        if not path.exists():  # it is ours, or whoever was first has died
            [whole] = claim.iterdir()
            write_bytes(path, whole.read_bytes())
        return is_ours
    finally:
        _delete_claim(folder)


def _delete_claim(folder: Path) -> None:
    with suppress(OSError):  # nobody looks at one that is left
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def _claim_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.once")


def _draft_of(path: Path) -> Path:
    """Returns a unique name: on another node, a process may have the same id."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.tmp")


def _write_draft(draft: Path, data: bytes) -> None:
    draft.parent.mkdir(parents=True, exist_ok=True)
    fd = _open_draft(draft)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_draft(draft: Path) -> int:
    """Creates a draft: replaces one of an attempt that seemed to fail, and never follows or
    overwrites anything else of that name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(draft, flags, 0o666)
    except FileExistsError:
        draft.unlink(missing_ok=True)
        return os.open(draft, flags, 0o666)


def finite(
    record: dict[str, Any], default: Callable[[object], object] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Replaces every non-finite number of `record` by null.

    Args:
        default: as `json.dumps` takes it.

    Returns:
        The record, and the keys of such numbers: NaN, Infinity or -Infinity.
    """
    said, odd = dict[str, Any](), dict[str, str]()
    for key, value in record.items():
        numbers = list[str]()
        # The parser puts what `append` returns in place of such a number: None.
        said[key] = json.loads(json.dumps(value, default=default), parse_constant=numbers.append)
        if numbers:
            odd[key] = numbers[-1]
    return said, odd


def compact(value: object) -> str:
    """Returns a value as JSON without spaces; what JSON has no form for, as its text."""
    try:
        said, _ = finite({"": value}, str)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, or a circle
        said = {"": str(value)}
    text = json.dumps(said[""], ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="replace").decode()  # a lone surrogate is in no file


def read_json(path: Path) -> Any | None:  # noqa: ANN401
    """Returns the record at `path`; None while there is none."""
    try:
        return json.loads(read_bytes(path))
    except FileNotFoundError:
        return None


def read_bytes(path: Path) -> bytes:
    def read() -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0) as file:
            return file.read() or b""

    return storage.patiently(path, read)


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


T = TypeVar("T")

GRAIN_S = 2.0
"""Resolution of a server's clock: read once more this long after a change, as a second change
within it may be invisible."""
REFRESH_S = 10.0
"""A record is reread at least this often, whatever the folder says."""
TOLD_S = 120.0
"""The same, once the folder has shown a change by another process and is trusted."""
_AT_EMPTY_PATH, _AT_STATX_FORCE_SYNC, _STATX_MTIME_CTIME = 0x1000, 0x2000, 0xC0
_STATX_BYTES, _TIMES = 256, struct.Struct("=96xqI4xqI")
_Stamp = tuple[int, ...]


class Folder:
    """Counts the changes of the names in a folder, for all threads of a process."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._fd: int | None = None
        self._close: weakref.finalize[..., Folder] | None = None
        self._is_parent = False
        """Whether the held folder is the nearest existing parent."""
        self._count = 0
        self._stamp: _Stamp | None = None
        self._again_at = float("inf")
        self.has_told = False
        """Whether another process's change was ever seen."""

    def count(self) -> int:
        """Returns a number that differs if names may have changed since the last call.

        An unreadable folder counts as changed.
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
        """Notes a change by this process."""
        with self._lock:
            self._stamp = None

    def _look(self) -> _Stamp | None:
        try:
            stamp = None if self._fd is None else _read_stamp(self._fd)
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
        return _read_stamp(self._fd)

    def _let_go(self) -> None:
        if self._close is not None:
            self._close()
        self._fd = self._close = None


class RecordCache(Generic[T]):
    """Cached records of one folder, by name.

    Args:
        read: reads one record; callers must not change the result.
        refresh_s: rereads all at least this often; every `TOLD_S` once the folder is trusted.
    """

    def __init__(
        self, folder: Path, read: Callable[[str], T], *, refresh_s: float = REFRESH_S
    ) -> None:
        self._folder, self._read, self._refresh_s = folder_at(folder), read, refresh_s
        self._lock, self._count, self._refresh_at = threading.Lock(), -1, 0.0
        self._found: dict[str, T] = {}

    def get(self, *names: str) -> list[T]:
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
    """Caches `read`, which reads the record at `path`, for repeated calls."""
    seen = RecordCache(path.parent, lambda _: read())
    return lambda: seen.get(path.name)[0]


@lru_cache(64)
def folder_at(path: Path) -> Folder:
    """Returns this process's shared `Folder`."""
    return Folder(path)


def _close(fd: int) -> None:
    with suppress(OSError):  # it was only looked at
        os.close(fd)


def _read_stamp(fd: int) -> _Stamp:
    """Times of the last change of a folder, by the server's clock."""
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
