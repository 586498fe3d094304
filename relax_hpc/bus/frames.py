"""Growing files of JSON records, each framed by length and CRC32C: the plan and the credits."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_hpc.bus.durable import checksum, pread_into, pwrite_all, sync_folder
from relax_hpc.errors import BusError

MAGIC = b"\x89RLF"  # cannot occur inside JSON text
FRAME = struct.Struct("<4sII")
"""Magic, bytes of JSON, CRC32C of length and JSON."""
Record = dict[str, Any]


def encode(record: Record) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return FRAME.pack(MAGIC, len(text), _crc(text)) + text


def decode(data: bytes, path: Path) -> tuple[list[Record], int]:
    """The complete frames at the front of `data`, and how many bytes they take.

    Raises:
        BusError: a damaged frame with others behind it.
    """
    frames = list(_frames(data, path))
    return [record for record, _ in frames], frames[-1][1] if frames else 0


def _frames(data: bytes, path: Path) -> Iterator[tuple[Record, int]]:
    """Each record with the offset of its end."""
    at = 0
    while at + FRAME.size <= len(data):
        magic, size, crc = FRAME.unpack_from(data, at)
        text = data[at + FRAME.size : at + FRAME.size + size]
        if magic != MAGIC or len(text) < size or _crc(text) != crc:
            if data.find(MAGIC, at + 1) >= 0:
                raise BusError(
                    f"{path}: a record is damaged but later ones follow; restore the file"
                )
            break
        at += FRAME.size + size
        yield json.loads(text), at


def _crc(text: bytes) -> int:
    return checksum(struct.pack("<I", len(text)) + text)


def read_frames(path: Path, start: int = 0) -> list[tuple[Record, int]]:
    """All records from byte `start` on, as of now, each with the offset of its end.

    A torn tail is not a record.
    """
    with path.open("rb") as file:
        file.seek(start)
        return [(record, start + end) for record, end in _frames(file.read(), path)]


class FrameWriter:
    """Appends to a framed file; makes it, or continues it behind its last whole record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            data = bytearray(os.fstat(self._fd).st_size)
            pread_into(self._fd, memoryview(data), 0)
            self.found, self.end = decode(bytes(data), path)
            """Records that were there, and where the next one begins."""
            if len(data) > self.end:
                os.ftruncate(self._fd, self.end)
                os.fsync(self._fd)
            if not data:
                sync_folder(path.parent)
        except OSError as error:
            raise BusError(f"{path}: cannot be opened for writing: {error.strerror}") from error

    def append(self, record: Record) -> None:
        """Adds `record`: on return it is on disk.

        Raises:
            BusError: another process writes this file, or storage refused.
        """
        if os.fstat(self._fd).st_size != self.end:
            raise BusError(f"{self.path}: another process writes it; this one must end")
        frame = encode(record)
        try:
            pwrite_all(self._fd, frame, self.end)
            os.fsync(self._fd)
        except OSError as error:
            raise BusError(f"{self.path}: cannot be written: {error.strerror}") from error
        self.end += len(frame)

    def skip(self, size: int) -> None:
        """Goes on behind what another process has appended."""
        self.end += size

    def close(self) -> None:
        os.close(self._fd)
