"""Bytes that survive a crash: complete writes, flushes, and what a full file system means."""

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import cast

from relax_hpc import storage
from relax_hpc.errors import BusError
from relax_hpc.records import Buffer, checksum

MAX_BUFFERS = 1024  # of one system call: IOV_MAX of Linux
_SYNC_FILE_RANGE_WRITE = 2
FULL_RETRY_S = 5.0
"""Seconds between attempts to write to a full file system."""


class BusFullError(BusError):
    """No space or no quota; nothing was published. Try again once shards were collected.

    Args:
        path: what was to be written.
        error: as the operating system told it.
    """

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path}: {error.strerror}; free space or raise the quota")
        self.path, self.error = path, error


class Space:
    """The space that a role finds for its shards: nothing is tried while there was none just now.

    What was to be written stays with the caller until `write` says that it was.
    """

    def __init__(self) -> None:
        self._retry_at = self._begun = 0.0

    @property
    def full(self) -> bool:
        """Whether the last attempt found no space."""
        return self._retry_at > 0

    def write(self, put: Callable[[], object]) -> bool:
        """Calls `put`, unless it is too soon to try again.

        Returns:
            Whether it was called and found space.
        """
        if time.monotonic() < self._retry_at:
            return False
        if self.full and not storage.restore_reserve():  # small records come first
            self._retry_at = time.monotonic() + FULL_RETRY_S
            return False
        try:
            put()
        except BusFullError as error:
            now = time.monotonic()
            self._begun = self._begun or now
            storage.note(error.path, error.error, self._begun)
            self._retry_at = now + FULL_RETRY_S
            return False
        self._retry_at = self._begun = 0.0
        return True


def is_full(error: OSError) -> bool:
    return error.errno in storage.FULL


def pwrite_all(fd: int, data: Buffer, offset: int) -> None:
    """Writes all of `data`; the kernel may take less per call than it was given."""
    pwritev_all(fd, [data], offset)


def pwritev_all(fd: int, buffers: Iterable[Buffer], offset: int) -> None:
    """Writes buffers end to end, many with each system call."""
    rest = [memoryview(data) for data in buffers if len(data)]
    while rest:
        written = os.pwritev(fd, rest[:MAX_BUFFERS], offset)
        offset += written
        done = 0
        while done < len(rest) and written >= len(rest[done]):
            written -= len(rest[done])
            done += 1
        rest = rest[done:]
        if written:
            rest[0] = rest[0][written:]


def close_flushed(fd: int) -> None:
    """Closes what was flushed before: whatever storage says now, nothing is lost."""
    with suppress(OSError):
        os.close(fd)


def write_in_place(path: Path, data: Buffer, offset: int) -> None:
    """Writes again what stands there, so that a flush is about it."""
    fd = os.open(path, os.O_WRONLY | os.O_DSYNC | os.O_CLOEXEC)
    try:
        pwrite_all(fd, data, offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def start_writeback(fd: int, offset: int, size: int) -> None:
    """Asks the kernel to begin writing a range to storage, so that less is left to the fsync.

    Only a hint: where it is not known nothing happens, and errors show at the fsync.
    """
    call = _sync_file_range()
    if call is not None:
        call(fd, offset, size, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast(Callable[[int, int, int, int], int] | None, call)


def pread_into(fd: int, out: memoryview, offset: int) -> int:
    """Fills `out` from `offset`.

    Returns:
        Bytes read; fewer than `len(out)` only at the end of the file.
    """
    got = 0
    while got < len(out):
        read = os.preadv(fd, [out[got:]], offset + got)
        if read == 0:
            break
        got += read
    return got


def block_checksums(buffers: Sequence[Buffer], block: int) -> list[int]:
    """Checksum of every `block` bytes of buffers that lie end to end; the last may be shorter."""
    checksums, value, room = [], 0, block
    for buffer in buffers:
        rest = memoryview(buffer)
        while rest:
            part, rest = rest[:room], rest[room:]
            value, room = checksum(part, value), room - len(part)
            if not room:
                checksums.append(value)
                value, room = 0, block
    return checksums if room == block else [*checksums, value]
