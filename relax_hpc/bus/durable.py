"""Writes bytes that survive a crash, and reports full file systems; reads files that others append
to, past the caches of a network file system.

A client cache may hide a grown file for seconds; a read with O_DIRECT asks the server. If the mount
refuses it, opening anew for each poll gives at least close-to-open consistency. The mode is found
when a file is opened, and logged once per file system and folder (O_DIRECT at level DEBUG).
"""

import ctypes
import errno
import logging
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import cast

from relax_hpc.errors import BusError
from relax_hpc.runtime.files import storage
from relax_hpc.runtime.files.records import Buffer, checksum
from relax_hpc.runtime.files.storage import patiently

log = logging.getLogger(__name__)

MAX_BUFFERS = 1024  # of one system call: IOV_MAX of Linux
_SYNC_FILE_RANGE_WRITE = 2
FULL_RETRY_S = 5.0
"""Seconds between attempts to write to a full file system."""


class BusFullError(BusError):
    """No space or no quota; nothing was published. Retry after shards were collected."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path}: {error.strerror}; free space or raise the quota")
        self.path, self.error = path, error


class Space:
    """Limits how often a role tries to write to a full file system.

    The data stay with the caller until `write` succeeds.
    """

    def __init__(self) -> None:
        self._retry_at = self._begun = 0.0

    @property
    def full(self) -> bool:
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
    """Closes a file that was flushed before; an error at close loses nothing."""
    with suppress(OSError):
        os.close(fd)


def write_in_place(path: Path, data: Buffer, offset: int) -> None:
    """Rewrites existing bytes, so that the next flush covers them."""
    fd = os.open(path, os.O_WRONLY | os.O_DSYNC | os.O_CLOEXEC)
    try:
        pwrite_all(fd, data, offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def start_writeback(fd: int, offset: int, size: int) -> None:
    """Asks the kernel to start writing a range to storage, so that fsync has less to do.

    Only a hint: unsupported systems ignore it, and errors show at the fsync.
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
    """Returns the checksum of every `block` bytes of buffers laid end to end; the last may be
    shorter."""
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


WINDOW = 64 << 10
PAGE = 4096
_DIRECT = max(PAGE, mmap.PAGESIZE)  # 64 KiB on some machines of ARM
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)
_AT_EMPTY_PATH, _AT_STATX_FORCE_SYNC, _STATX_SIZE = 0x1000, 0x2000, 0x200
_STATX_BYTES, _STATX_SIZE_AT = 256, 40


class GrowingFile:
    """Polls one growing file. The launcher made it, so no missing name is ever looked up.

    Raises:
        BusError: no such file, or it cannot be read; so does every read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer = mmap.mmap(-1, WINDOW)  # page-aligned, as O_DIRECT wants
        self._fd: int | None = None
        self.direct = True
        self._ask(0, most=1)  # some accept the flag and refuse the read

    def read_from(self, offset: int) -> bytes:
        return self._ask(offset)

    def _ask(self, offset: int, most: int = sys.maxsize) -> bytes:
        """Reads the bytes after `offset`; stops once there are `most`."""
        try:
            return patiently(self.path, lambda: self._poll_anew(offset, most))
        except FileNotFoundError:
            raise BusError(f"{self.path}: no such log; is this a bus of this run?") from None
        except OSError as error:
            raise BusError(f"{self.path}: cannot be read: {error.strerror}") from error

    def close(self) -> None:
        self._let_go()
        self._buffer.close()

    def _poll_anew(self, offset: int, most: int) -> bytes:
        try:
            return self._poll(offset, most)
        except OSError as error:
            self._let_go()
            if error.errno != errno.ESTALE:
                raise
        # The server forgot the file we held (it was restored, say); the name may still be good.
        return self._poll(offset, most)

    def _poll(self, offset: int, most: int) -> bytes:
        if self.direct:
            try:
                return self._poll_direct(offset, most)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self._let_go()
                self.direct = False
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = self._read(fd, offset, most)
            _tell_once(os.fstat(fd).st_dev, self.path.parent, direct=False)
        finally:
            os.close(fd)
        return data

    def _poll_direct(self, offset: int, most: int) -> bytes:
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            data = self._read(self._fd, offset, most)
            _tell_once(os.fstat(self._fd).st_dev, self.path.parent, direct=True)
            return data
        return self._read(self._fd, offset, most)

    def _read(self, fd: int, offset: int, most: int) -> bytes:
        out = bytearray()
        while len(out) < most:
            at = offset + len(out)
            start = at // _DIRECT * _DIRECT
            end = start + os.preadv(fd, [self._buffer], start)
            if end <= at:  # a read that is short says nothing of the end of the file
                break
            out += self._buffer[at - start : end - start]
        return bytes(out)

    def _let_go(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            close_flushed(fd)


def read_whole(path: Path, start: int = 0) -> bytes:
    file = GrowingFile(path)
    try:
        return file.read_from(start)
    finally:
        file.close()


def current_size(fd: int) -> int:
    """Returns the size of an open file as the server knows it; `os.fstat` may answer from a cache.

    On NFS it also makes this client append after the records of others: O_APPEND goes by the size
    that the client has cached.
    """
    call = _statx()
    if call is None:
        return os.fstat(fd).st_size
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    while call(fd, b"", _AT_EMPTY_PATH | _AT_STATX_FORCE_SYNC, _STATX_SIZE, answer):
        code = ctypes.get_errno()
        if code in (errno.ENOSYS, errno.EPERM):  # as some containers forbid it
            return os.fstat(fd).st_size
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return int.from_bytes(answer.raw[_STATX_SIZE_AT : _STATX_SIZE_AT + 8], "little")


@cache
def _statx() -> Callable[..., int] | None:
    return cast(
        Callable[..., int] | None, getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    )


@cache
def _tell_once(device: int, folder: Path, *, direct: bool) -> None:
    if direct:
        log.debug("%s: logs are read with O_DIRECT, past the client's cache", folder)
        return
    log.warning(
        "%s: O_DIRECT is refused here; logs are opened anew for each poll, which costs metadata "
        "operations, and may see what was committed as late as the client's attribute cache allows",
        folder,
    )
