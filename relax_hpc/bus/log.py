"""The commit log of one producer: 128-byte records. A shard exists once its record does."""

import struct
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from relax_hpc.bus.tail import GrowingFile
from relax_hpc.errors import BusError
from relax_hpc.records import checksum
from relax_hpc.schema import PRODUCER, ROLES, Role

MAGIC = b"RLC1"
RECORD = struct.Struct("<4sHHIQ16s16sQIQiiqq28sI")
RECORD_BYTES = 128
assert RECORD.size == RECORD_BYTES


class RecordKind(IntEnum):
    """The kinds of commit records."""

    BASE = 1
    """A shard of trajectories is committed."""
    SIDE = 2
    """A shard with further columns of the shard `parent` is committed."""
    OPEN = 3
    """The producer opened a fence: what older fences left without a record is an orphan."""
    CLOSE = 4
    """The producer ended on purpose."""
    PARTIAL = 5
    """A shard of unfinished prompt groups is committed: its owner goes on with them later."""
    CUT = 6
    """No record stands from byte `length` of the log to here: its writer died over it."""


SHARDS = (RecordKind.BASE, RecordKind.SIDE, RecordKind.PARTIAL)
"""Kinds of record that name a file."""

ROLE_OF_NUMBER: dict[int, Role] = {number: role for role, number in ROLES.items()}


class CommitRecord(NamedTuple):
    """One record; guids and versions are -1 where there is no trajectory."""

    kind: RecordKind
    fence: int
    seq: int
    role: Role = PRODUCER
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
        ROLES[record.role],
        record.fence,
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
    _, kind, role, fence, seq, uuid, parent, *numbers, _, crc = RECORD.unpack(data)
    if checksum(data[:-4]) != crc:
        return None
    return CommitRecord(
        RecordKind(kind), fence, seq, ROLE_OF_NUMBER[role], uuid.hex(), parent.hex(), *numbers
    )


def decode(data: bytes, path: Path, first: int) -> list[CommitRecord]:
    """The records at the front of `data`, whose first byte is that of record number `first`.

    A tail that is no record was being written when its producer died, or still is. It is never
    cut off: who does that may be late, and cut off what others have committed since. It is filled
    with zeros and marked by a CUT, which stands for all of it here.

    Raises:
        BusError: a damaged record with others behind it; what was committed is never skipped.
    """
    records: list[CommitRecord] = []
    for at in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        record = unpack(data[at : at + RECORD_BYTES])
        torn_at = len(records) * RECORD_BYTES
        if record is None:
            continue
        if at > torn_at and not _cuts(record, data[torn_at:at], first * RECORD_BYTES + torn_at):
            raise BusError(
                f"{path}: record {first + len(records)} is damaged but later ones follow; "
                "restore the log, the shards it names cannot be trusted without it"
            )
        records += [record] * ((at - torn_at) // RECORD_BYTES + 1)
    return records


def _cuts(record: CommitRecord, torn: bytes, offset: int) -> bool:
    """Whether `record` says that what lies before it is no record, and it looks like that.

    Whole records that were committed do not end with a zero, but for one in 256.
    """
    whole = torn.startswith(MAGIC) and torn[RECORD_BYTES - 1] != 0
    return record.kind is RecordKind.CUT and record.length == offset and not whole


class Fences:
    """Tells the records that count from those that a superseded owner slipped in.

    An OPEN takes the log over if its fence is above all before it. From there on only records of
    that fence count; whatever another owner appends is not committed.
    """

    def __init__(self, current: int = 0) -> None:
        self.current = current

    def admit(self, record: CommitRecord) -> bool:
        """Whether the next record of the log counts."""
        if record.kind is RecordKind.CUT:
            return False
        if record.kind is RecordKind.OPEN:
            first = record.fence > self.current
            self.current = max(self.current, record.fence)
            return first
        return record.fence == self.current


class LogTail:
    """Follows a log.

    Args:
        path: of the log.
        start: records to pass over.
        fence: of the owner there.
    """

    def __init__(self, path: Path, *, start: int = 0, fence: int = 0) -> None:
        self.num_records = start
        """Read so far, those that do not count included."""
        self._file = GrowingFile(path)
        self._fences = Fences(fence)

    @property
    def fence(self) -> int:
        """Fence of the owner at the end of what was read."""
        return self._fences.current

    def poll(self) -> list[CommitRecord]:
        """The valid records committed since the last poll.

        Raises:
            BusError: a committed record is damaged.
        """
        return [record for _, record in self.poll_numbered()]

    def poll_numbered(self) -> list[tuple[int, CommitRecord]]:
        """Returns what `poll` does, each record with its number in the log."""
        data = self._file.read_from(self.num_records * RECORD_BYTES)
        first, records = self.num_records, decode(data, self._file.path, self.num_records)
        self.num_records += len(records)
        return [(n, r) for n, r in enumerate(records, first) if self._fences.admit(r)]

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[CommitRecord]:
    """All valid records of a log, as of now."""
    tail = LogTail(path)
    try:
        return tail.poll()
    finally:
        tail.close()
