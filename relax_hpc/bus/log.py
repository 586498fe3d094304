"""The commit log of one producer: 128-byte records. A shard exists once its record does."""

import os
import struct
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from relax_hpc.bus.durable import (
    checksum,
    is_full,
    pread_into,
    pwrite_all,
    sync_folder,
)
from relax_hpc.bus.tail import GrowingFile
from relax_hpc.errors import BusError
from relax_hpc.schema import ROLES, Role

MAGIC = b"RLC1"
RECORD = struct.Struct("<4sHHIQ16s16sQIQiiqq28sI")
RECORD_BYTES = 128
BALLAST_BYTES = 256 << 10
assert RECORD.size == RECORD_BYTES


class RecordKind(IntEnum):
    """What a commit record says."""

    BASE = 1
    """A shard of trajectories is committed."""
    SIDE = 2
    """A shard with further columns of the shard `parent` is committed."""
    OPEN = 3
    """The producer opened an epoch: what older epochs left without a record is an orphan."""
    CLOSE = 4
    """The producer ended on purpose."""


class CommitRecord(NamedTuple):
    """One record; guids and versions are -1 where there is no trajectory."""

    kind: RecordKind
    epoch: int
    seq: int
    role: Role = "rollout"
    uuid: str = "0" * 32
    parent: str = "0" * 32
    length: int = 0
    rows: int = 0
    tokens: int = 0
    policy_version_min: int = -1
    policy_version_max: int = -1
    guid_min: int = -1
    guid_max: int = -1


def pack(record: CommitRecord) -> bytes:
    body = RECORD.pack(
        MAGIC,
        record.kind,
        ROLES.index(record.role),
        record.epoch,
        record.seq,
        bytes.fromhex(record.uuid),
        bytes.fromhex(record.parent),
        record.length,
        record.rows,
        record.tokens,
        record.policy_version_min,
        record.policy_version_max,
        record.guid_min,
        record.guid_max,
        b"",
        0,
    )[:-4]
    return body + struct.pack("<I", checksum(body))


def unpack(data: bytes) -> CommitRecord | None:
    """The record in 128 bytes; None if they are not (or not yet) one."""
    if len(data) < RECORD_BYTES or not data.startswith(MAGIC):
        return None
    _, kind, role, epoch, seq, uuid, parent, *numbers, _, crc = RECORD.unpack(data)
    if checksum(data[:-4]) != crc:
        return None
    return CommitRecord(
        RecordKind(kind), epoch, seq, ROLES[role], uuid.hex(), parent.hex(), *numbers
    )


def decode(data: bytes, path: Path, first: int) -> list[CommitRecord]:
    """The records at the front of `data`, whose first byte is that of record number `first`.

    A tail that is no record was being written when its producer died, or still is.

    Raises:
        BusError: a damaged record with others behind it; what was committed is never skipped.
    """
    records: list[CommitRecord] = []
    for at in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        record = unpack(data[at : at + RECORD_BYTES])
        if record is None:
            if data.find(MAGIC, at + RECORD_BYTES) >= 0:
                raise BusError(
                    f"{path}: record {first + len(records)} is damaged but later ones follow; "
                    "restore the log, the shards it names cannot be trusted without it"
                )
            break
        records.append(record)
    return records


class LogWriter:
    """The one writer of a log.

    The log grows with each record: a change of size is what every client cache revalidates on.

    Raises:
        BusError: no such log, or a committed record is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise BusError(f"{path}: no such log; is the producer one of this run's?") from None
        data = bytearray(os.fstat(self._fd).st_size)
        pread_into(self._fd, memoryview(data), 0)
        self.records = decode(bytes(data), path, 0)
        if len(data) > self._end:  # the torn tail of a dead incarnation: never committed
            os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)
        self._failed = False
        self.restore_ballast()

    @property
    def _end(self) -> int:
        return len(self.records) * RECORD_BYTES

    @property
    def _ballast(self) -> Path:
        return self.path.with_name("ballast")

    def append(self, record: CommitRecord) -> None:
        """Commits `record`: on return it is on disk.

        Raises:
            BusError: another process writes this log, or an append failed and what is on disk is
                unknown; restarting the producer finds out.
        """
        if self._failed or os.fstat(self._fd).st_size != self._end:
            raise BusError(
                f"{self.path}: another process writes it, or an append failed; "
                "only a restart of this producer can tell what was committed"
            )
        self._failed = True
        try:
            self._write(record)
        except OSError as error:
            raise BusError(
                f"{self.path}: record {len(self.records)} cannot be written: {error.strerror}; "
                "restart this producer once that is remedied"
            ) from error
        self.records.append(record)
        self._failed = False

    def _write(self, record: CommitRecord) -> None:
        try:
            pwrite_all(self._fd, pack(record), self._end)
            os.fsync(self._fd)
        except OSError as error:
            if not is_full(error) or not self._ballast.exists():
                raise
            # The shard is already on disk; give back the reserve so that it can be committed.
            self._ballast.unlink()
            pwrite_all(self._fd, pack(record), self._end)
            os.fsync(self._fd)

    def restore_ballast(self) -> None:
        """Reserves the space that an append may need on a full file system, if there is some."""
        if self._ballast.exists():
            return
        try:
            self._ballast.write_bytes(bytes(BALLAST_BYTES))
            sync_folder(self.path.parent)
        except OSError as error:
            if not is_full(error):
                raise
            self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._fd)


class LogTail:
    """Follows a producer's log."""

    def __init__(self, path: Path) -> None:
        self.num_records = 0
        self._file = GrowingFile(path)

    def poll(self) -> list[CommitRecord]:
        """The records committed since the last poll.

        Raises:
            BusError: a committed record is damaged.
        """
        data = self._file.read_from(self.num_records * RECORD_BYTES)
        records = decode(data, self._file.path, self.num_records)
        self.num_records += len(records)
        return records

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[CommitRecord]:
    """All records of a log, as of now."""
    tail = LogTail(path)
    try:
        return tail.poll()
    finally:
        tail.close()
