"""Growing files of JSON records, each framed by length and CRC32C: the plan and the credits."""

import json
import os
import struct
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
    records, at = [], 0
    while at + FRAME.size <= len(data):
        magic, size, crc = FRAME.unpack_from(data, at)
        text = data[at + FRAME.size : at + FRAME.size + size]
        if magic != MAGIC or len(text) < size or _crc(text) != crc:
            if data.find(MAGIC, at + 1) >= 0:
                raise BusError(
                    f"{path}: a record is damaged but later ones follow; restore the file"
                )
            break
        records.append(json.loads(text))
        at += FRAME.size + size
    return records, at


def _crc(text: bytes) -> int:
    return checksum(struct.pack("<I", len(text)) + text)


def read_frames(path: Path) -> list[Record]:
    """All records of a file, as of now; a torn tail is not one."""
    return decode(path.read_bytes(), path)[0]


class FrameWriter:
    """The one writer of a framed file; makes it, or continues it behind its last whole record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        data = bytearray(os.fstat(self._fd).st_size)
        pread_into(self._fd, memoryview(data), 0)
        self.records, self._end = decode(bytes(data), path)
        if len(data) > self._end:
            os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)
        if not data:
            sync_folder(path.parent)

    def append(self, record: Record) -> None:
        """Adds `record`: on return it is on disk.

        Raises:
            BusError: another process writes this file, or storage refused.
        """
        if os.fstat(self._fd).st_size != self._end:
            raise BusError(f"{self.path}: another process writes it; this one must end")
        frame = encode(record)
        try:
            pwrite_all(self._fd, frame, self._end)
            os.fsync(self._fd)
        except OSError as error:
            raise BusError(f"{self.path}: cannot be written: {error.strerror}") from error
        self.records.append(record)
        self._end += len(frame)

    def close(self) -> None:
        os.close(self._fd)
