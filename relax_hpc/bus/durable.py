"""Bytes that survive a crash: complete writes, flushes, and what a full file system means."""

import errno
import os
from pathlib import Path
from typing import cast

import crc32c as _crc32c

from relax_hpc.errors import BusError

Buffer = bytes | bytearray | memoryview


class BusFullError(BusError):
    """No space or no quota; nothing was published. Try again once shards were collected."""


def checksum(data: Buffer) -> int:
    """CRC32C (Castagnoli), as the CPU computes it: about 10 GB/s on one core."""
    return cast(int, _crc32c.crc32c(data))


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def pwrite_all(fd: int, data: Buffer, offset: int) -> None:
    """Writes all of `data`; the kernel may take less per call than it was given."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


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


def sync_folder(folder: Path) -> None:
    """Makes a rename or a new name in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
