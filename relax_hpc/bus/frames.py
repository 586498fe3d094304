"""Reads and writes growing files of JSON records framed by length and CRC32C (plan, credits)."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_hpc.bus.durable import (
    close_flushed,
    current_size,
    pwrite_all,
    read_whole,
    write_in_place,
)
from relax_hpc.errors import BusError
from relax_hpc.runtime.files.records import checksum, sync
from relax_hpc.runtime.files.storage import patiently

MAGIC = b"\x89RLF"  # cannot occur inside JSON text
FRAME = struct.Struct("<4sII")
"""Magic, bytes of JSON, CRC32C of length and JSON."""
CUT = "cut"
"""Key of a record that marks the bytes from this offset to the record as invalid."""
Record = dict[str, Any]


def encode(record: Record) -> bytes:
    text = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
    return FRAME.pack(MAGIC, len(text), _crc(text)) + text


def decode(data: bytes, path: Path, start: int = 0) -> tuple[list[Record], int]:
    """Returns the complete frames at the front of `data`, and their total bytes.

    Raises:
        BusError: a damaged frame with others behind it.
    """
    records, size = [], 0
    for record, end in _frames(data, path, start):
        size = end - start
        if CUT not in record:
            records.append(record)
    return records, size


def _frames(data: bytes, path: Path, start: int) -> Iterator[tuple[Record, int]]:
    """Yields each record with the offset of its end in the file, CUTs included.

    A torn tail is never truncated: a late process might truncate newer records of others. A CUT
    after it says where it began.
    """
    at = 0
    while (frame := _next_frame(data, at)) is not None:
        begin, end, record = frame
        if begin > at and record.get(CUT) != start + at:
            raise BusError(f"{path}: a record is damaged but later ones follow; restore the file")
        at = end
        yield record, start + at


def _next_frame(data: bytes, at: int) -> tuple[int, int, Record] | None:
    """Returns begin, end and record of the first whole frame after `at`."""
    while (at := data.find(MAGIC, at)) >= 0 and at + FRAME.size <= len(data):
        _, size, crc = FRAME.unpack_from(data, at)
        text = data[at + FRAME.size : at + FRAME.size + size]
        if len(text) == size and _crc(text) == crc:
            return at, at + FRAME.size + size, json.loads(text)
        at += 1
    return None


def _crc(text: bytes) -> int:
    return checksum(struct.pack("<I", len(text)) + text)


def read_frames(path: Path, start: int = 0) -> list[tuple[Record, int]]:
    """Returns the current records from byte `start` on, each with the offset of its end.

    A torn tail is not a record.
    """
    data = read_whole(path, start)
    return [(record, end) for record, end in _frames(data, path, start) if CUT not in record]


class FrameWriter:
    """Appends to a framed file; creates it, or continues after its last whole record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = 0
        """Offset of the next record."""
        self._is_sure = True
        """Whether the file is known to end there."""
        try:
            self._fd = patiently(path, self._open)
            data = read_whole(path)
            self.found, self.end = decode(data, path)
            """Records that were there."""
            if len(data) > self.end:
                self._put(encode({CUT: self.end}), len(data))
            if not data:
                patiently(path, lambda: sync(path.parent))
        except OSError as error:
            raise BusError(f"{path}: cannot be opened for writing: {error.strerror}") from error

    def append(self, record: Record) -> None:
        """Adds `record`; on return it is on disk, once.

        Raises:
            BusError: another process writes this file, or storage refused.
        """
        try:
            self._put(encode(record), self.end)
        except OSError as error:
            raise BusError(f"{self.path}: cannot be written: {error.strerror}") from error

    def skip(self, size: int) -> None:
        """Moves past records that another process appended."""
        self.end += size

    def close(self) -> None:
        close_flushed(self._fd)

    def _open(self) -> int:
        # Why O_DSYNC, and why it is not read through this descriptor: see `LogWriter`.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_DSYNC | os.O_CLOEXEC
        return os.open(self.path, flags, 0o644)

    def _put(self, frame: bytes, size: int) -> None:
        """Appends a frame to a file of `size` bytes, and moves `end` after it."""

        def put() -> None:
            if not self._is_sure:
                self._put_again(frame)
                return
            if current_size(self._fd) != size:
                raise self._not_alone()
            self._is_sure = False
            pwrite_all(self._fd, frame, size)
            os.fsync(self._fd)
            self.end = size + len(frame)
            self._is_sure = True

        patiently(self.path, put, small=True)

    def _put_again(self, frame: bytes) -> None:
        """Appends a frame, none, part or all of which may be in the file already."""
        close_flushed(self._fd)
        self._fd = self._open()
        rest = read_whole(self.path, self.end)
        records, size = decode(rest, self.path, self.end)
        is_there = rest[:size].endswith(frame)
        if len(records) > 1 or (records and not is_there):
            raise self._not_alone()
        if is_there:
            # What a flush failed for may be in a cache alone: only what is written anew is flushed.
            write_in_place(self.path, rest[:size], self.end)
        else:
            self.end += size  # a CUT of an attempt before
            at, size = self.end, len(rest) - size
            data = encode({CUT: at}) + frame if size else frame
            pwrite_all(self._fd, data, at + size)
            os.fsync(self._fd)
            size += len(data)
        self.end += size
        self._is_sure = True

    def _not_alone(self) -> BusError:
        return BusError(f"{self.path}: another process writes it; this one must end")
