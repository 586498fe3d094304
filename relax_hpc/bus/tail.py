"""Reading what another process keeps appending to, past the caches of a network file system.

A client cache may hide a grown file for seconds; a read with O_DIRECT asks the server. Where the
mount refuses it, opening anew for each poll gives at least close-to-open consistency.
"""

import mmap
import os
from pathlib import Path

from relax_hpc.errors import BusError

WINDOW = 64 << 10
PAGE = 4096
_NO_FD = -1


class GrowingFile:
    """Polls one growing file. Made at launch, so a name that may not exist is never looked up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer = mmap.mmap(-1, WINDOW)  # page-aligned, as O_DIRECT wants
        self._fd = self._probe()
        self.direct = self._fd != _NO_FD

    def _probe(self) -> int:
        """A descriptor for O_DIRECT reads, if the mount really serves them."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except FileNotFoundError:
            raise BusError(f"{self.path}: no such log; is this a bus of this run?") from None
        except OSError:
            return _NO_FD
        try:
            os.preadv(fd, [self._buffer], 0)
        except OSError:  # some accept the flag and refuse the read
            os.close(fd)
            return _NO_FD
        return fd

    def read_from(self, offset: int) -> bytes:
        """What there is behind `offset` now."""
        if self.direct:
            return self._read(self._fd, offset)
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._read(fd, offset)
        finally:
            os.close(fd)

    def _read(self, fd: int, offset: int) -> bytes:
        out = bytearray()
        while True:
            start = (offset + len(out)) // PAGE * PAGE
            end = start + os.preadv(fd, [self._buffer], start)
            out += self._buffer[offset + len(out) - start : max(end - start, 0)]
            if end < start + WINDOW:
                return bytes(out)

    def close(self) -> None:
        if self.direct:
            os.close(self._fd)
            self.direct = False
        self._buffer.close()
