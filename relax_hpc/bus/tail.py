"""Reading what another process keeps appending to, past the caches of a network file system.

A client cache may hide a grown file for seconds; a read with O_DIRECT asks the server. Where the
mount refuses it, opening anew for each poll gives at least close-to-open consistency. Which of the
two it is, is tried when the file is opened, and logged once per file system.
"""

import ctypes
import errno
import logging
import mmap
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

from relax_hpc.bus.durable import close_flushed
from relax_hpc.errors import BusError
from relax_hpc.storage import patiently

log = logging.getLogger(__name__)

WINDOW = 64 << 10
PAGE = 4096
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)
_AT_EMPTY_PATH, _AT_STATX_FORCE_SYNC, _STATX_SIZE = 0x1000, 0x2000, 0x200
_STATX_BYTES, _STATX_SIZE_AT = 256, 40


class GrowingFile:
    """Polls one growing file. Made at launch, so a name that may not exist is never looked up.

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
        """Reads everything behind `offset`."""
        return self._ask(offset)

    def _ask(self, offset: int, most: int = sys.maxsize) -> bytes:
        """Reads what is behind `offset`; nothing more once that is `most` bytes."""
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
            start = at // PAGE * PAGE
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
    """All of a growing file behind `start`, as of now."""
    file = GrowingFile(path)
    try:
        return file.read_from(start)
    finally:
        file.close()


def current_size(fd: int) -> int:
    """The size of an open file as the server knows it; `os.fstat` may answer from a cache.

    On NFS it also makes this client append behind what others wrote: O_APPEND goes by the size
    that the client believes in.
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
        log.info("%s: logs are read with O_DIRECT, past the client's cache", folder)
        return
    log.warning(
        "%s: O_DIRECT is refused here; logs are opened anew for each poll, which costs metadata "
        "operations, and may see what was committed as late as the client's attribute cache allows",
        folder,
    )
