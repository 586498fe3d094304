"""A file that is written once, on storage that may fail for a while.

A write that is refused is made again, at the same place. A flush is not: what it was about may be
lost, and its tensors are forgotten by then, so the save has failed and a later one is whole.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from relax_hpc.storage import patiently


class NewFile:
    """Takes bytes at offsets, from any thread."""

    def __init__(self, path: Path) -> None:
        self._path, self._fds = path, list[int]()
        patiently(path, lambda: self._open(os.O_CREAT | os.O_TRUNC))

    def pwrite(self, data: memoryview, at: int) -> None:
        while data:
            written = patiently(self._path, partial(self._pwrite, data, at))
            at, data = at + written, data[written:]

    def sync(self) -> None:
        for fd in self._fds:
            os.fsync(fd)

    def close(self) -> None:
        """Closes it: some file systems tell only now that there is no room."""
        while self._fds:
            os.close(self._fds.pop())

    def _open(self, flags: int) -> None:
        self._fds.append(os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666))

    def _pwrite(self, data: memoryview, at: int) -> int:
        try:
            return os.pwrite(self._fds[-1], data, at)
        except OSError as error:
            if error.errno == errno.ESTALE:  # the server forgot it; other threads may be at it
                self._open(0)
            raise


@contextmanager
def opened(path: Path) -> Iterator[NewFile]:
    file = NewFile(path)
    try:
        yield file
    finally:
        file.close()
