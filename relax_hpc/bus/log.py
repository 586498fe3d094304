"""Reads and appends to a producer's commit log of 128-byte records.

A shard exists once its record does. Appends are durable, fenced, and possible on a full file
system.
"""

import os
import struct
import uuid as uuidlib
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from relax_hpc.bus.durable import (
    GrowingFile,
    close_flushed,
    current_size,
    is_full,
    pwrite_all,
    write_in_place,
)
from relax_hpc.errors import BusError, FencedError
from relax_hpc.runtime.files.records import checksum, sync
from relax_hpc.runtime.files.storage import PASSING, delete, exists, patiently
from relax_hpc.schema import COLUMN_WRITERS, PRODUCER, ColumnWriter

MAGIC = b"RLC1"
RECORD = struct.Struct("<4sHHIQ16s16sQIQiiqq28sI")
RECORD_BYTES = 128
assert RECORD.size == RECORD_BYTES


class RecordKind(IntEnum):
    BASE = 1
    """A shard of trajectories is committed."""
    SIDE = 2
    """A shard with further columns of the shard `parent` is committed."""
    OPEN = 3
    """The producer opened a fence; files of older fences without a record are orphans."""
    CLOSE = 4
    """The producer ended on purpose."""
    PARTIAL = 5
    """A shard of unfinished prompt groups is committed; its owner continues them later."""
    CUT = 6
    """Marks bytes from `length` to here as invalid: their writer died over them."""


SHARDS = (RecordKind.BASE, RecordKind.SIDE, RecordKind.PARTIAL)

ROLE_OF_NUMBER: dict[int, ColumnWriter] = {number: role for role, number in COLUMN_WRITERS.items()}


class CommitRecord(NamedTuple):
    """One record; guids and versions are -1 if there is no trajectory."""

    kind: RecordKind
    fence: int
    seq: int
    role: ColumnWriter = PRODUCER
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
        COLUMN_WRITERS[record.role],
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
    """Parses 128 bytes; None if they are not (or not yet) a record."""
    if len(data) < RECORD_BYTES or not data.startswith(MAGIC):
        return None
    _, kind, role, fence, seq, uuid, parent, *numbers, _, crc = RECORD.unpack(data)
    if checksum(data[:-4]) != crc:
        return None
    return CommitRecord(
        RecordKind(kind), fence, seq, ROLE_OF_NUMBER[role], uuid.hex(), parent.hex(), *numbers
    )


def decode(data: bytes, path: Path, first: int) -> list[CommitRecord]:
    """Returns the records at the front of `data`, which begins with record number `first`.

    A tail that is no record was being written when its producer died, or still is. It is never
    truncated: a late process might truncate newer commits of others. It is filled with zeros and
    marked by a CUT, which replaces it in the result.

    Raises:
        BusError: a damaged record with others behind it; no committed record is ever skipped.
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
    """Whether `record` marks the bytes before it as invalid, and they look torn.

    Only one in 256 whole records ends with a zero.
    """
    whole = torn.startswith(MAGIC) and torn[RECORD_BYTES - 1] != 0
    return record.kind is RecordKind.CUT and record.length == offset and not whole


class Fences:
    """Separates records that count from those that a superseded owner appended.

    An OPEN takes the log over if its fence is above all before it. From there on only records of
    that fence count; records of other owners are not committed.
    """

    def __init__(self, current: int = 0) -> None:
        self.current = current

    def admit(self, record: CommitRecord) -> bool:
        if record.kind is RecordKind.CUT:
            return False
        if record.kind is RecordKind.OPEN:
            first = record.fence > self.current
            self.current = max(self.current, record.fence)
            return first
        return record.fence == self.current


class LogTail:
    def __init__(self, path: Path, *, start: int = 0, fence: int = 0) -> None:
        self.num_records = start
        """Records read so far, including those that do not count."""
        self._file = GrowingFile(path)
        self._fences = Fences(fence)

    @property
    def fence(self) -> int:
        """Returns the fence of the owner at the end of the part read."""
        return self._fences.current

    def poll(self) -> list[CommitRecord]:
        """Returns the valid records committed since the last poll.

        Raises:
            BusError: a committed record is damaged.
        """
        return [record for _, record in self.poll_numbered()]

    def poll_numbered(self) -> list[tuple[int, CommitRecord]]:
        """Does as `poll`, and returns each record with its number in the log."""
        data = self._file.read_from(self.num_records * RECORD_BYTES)
        first, records = self.num_records, decode(data, self._file.path, self.num_records)
        self.num_records += len(records)
        return [(n, r) for n, r in enumerate(records, first) if self._fences.admit(r)]

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[CommitRecord]:
    tail = LogTail(path)
    try:
        return tail.poll()
    finally:
        tail.close()


BALLAST_BYTES = 256 << 10


class LogWriter:
    """Appends to a log as its owner. Opening it takes the log over and fences the previous owner.

    The log grows with each record, because client caches revalidate on a change of size. Appends go
    to the current end of the file, so two live owners cannot overwrite each other. The order of the
    OPEN records decides whose record counts.

    Raises:
        BusError: no such log, or a committed record is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_DSYNC keeps an NFS client from sending, around the record, what its cache believes
            # of the rest of the page: it may be older than what another host has written there.
            self._flags = os.O_WRONLY | os.O_APPEND | os.O_DSYNC | os.O_CLOEXEC
            self._fd = patiently(path, lambda: os.open(path, self._flags))
        except FileNotFoundError:
            raise BusError(f"{path}: no such log; is the producer one of this run's?") from None
        except OSError as error:
            raise BusError(f"{path}: cannot be opened: {error.strerror}") from error
        # A client that has a file open for writing does not refresh what it cached of it.
        self._file = GrowingFile(path)
        self._end = 0
        self._fences = Fences()
        self._failed = False
        self.records: list[CommitRecord] = []
        """Valid records of previous owners."""
        self.fence = self._take_over()
        self._has_ballast = exists(self._ballast)
        self.restore_ballast()

    @property
    def next_seq(self) -> int:
        return max((r.seq for r in self.records if r.rows), default=-1) + 1

    def append(self, record: CommitRecord) -> None:
        """Commits `record`; on return it is on disk.

        Raises:
            FencedError: another process took this log over; this one must end.
            BusError: an append failed and the state on disk is unknown; restart the producer.
        """
        if self._failed:
            raise BusError(
                f"{self.path}: an append failed; only a restart of this producer can tell what "
                "was committed"
            )
        self.check_fenced()
        try:
            written = record in self._put(record)
        except OSError as error:
            raise BusError(
                f"{self.path}: record {self._end // RECORD_BYTES} cannot be written: "
                f"{error.strerror}; restart this producer once that is remedied"
            ) from error
        self._check_owner()  # an OPEN in front of the record: it does not count
        if not written:
            self._failed = True
            raise BusError(f"{self.path}: a record is not there after it was written")

    def check_fenced(self) -> None:
        """Raises FencedError if another process has taken the log over."""
        self._catch_up()
        self._check_owner()

    def restore_ballast(self) -> None:
        """Reserves the space that an append may need on a full file system, if possible."""
        if self._has_ballast:
            return
        try:
            patiently(self._ballast, self._make_ballast, errors=PASSING)
            self._has_ballast = True
        except OSError as error:
            if not is_full(error):
                raise BusError(f"{self._ballast}: cannot be made: {error.strerror}") from error
            delete(self._ballast)

    def _make_ballast(self) -> None:
        self._ballast.write_bytes(bytes(BALLAST_BYTES))
        sync(self.path.parent)

    def close(self) -> None:
        self._file.close()
        close_flushed(self._fd)

    @property
    def _ballast(self) -> Path:
        return self.path.with_name("ballast")

    def _take_over(self) -> int:
        """Appends an OPEN that counts; of two racing owners one retries with a higher fence."""
        while True:
            self.records += self._catch_up()
            fence = self._fences.current + 1
            claim = CommitRecord(RecordKind.OPEN, fence, self.next_seq, uuid=uuidlib.uuid4().hex)
            try:
                # Until it is written the owner before may commit something.
                self.records += (found := self._put(claim))
            except OSError as error:
                raise BusError(f"{self.path}: cannot be taken over: {error.strerror}") from error
            if claim in found:
                return fence

    def _check_owner(self) -> None:
        if self._fences.current != self.fence:
            raise FencedError(
                f"{self.path}: another process took it over (fence {self._fences.current} after "
                f"{self.fence}); this one must end"
            )

    def _catch_up(self) -> list[CommitRecord]:
        data = self._file.read_from(self._end)
        records = decode(data, self.path, self._end // RECORD_BYTES)
        self._end += len(records) * RECORD_BYTES
        return [record for record in records if self._fences.admit(record)]

    def _put(self, record: CommitRecord) -> list[CommitRecord]:
        """Appends a record, once, and returns the new valid records.

        Raises:
            OSError: storage refuses, and the state on disk is unknown.
        """
        found = list[CommitRecord]()

        def put() -> None:
            if self._failed:
                close_flushed(self._fd)
                self._fd = os.open(self.path, self._flags)
                begin = self._end
                found.extend(self._catch_up())
                if record in found:
                    # What a flush failed for may be in a cache alone: what is written anew is not.
                    at = begin + self._file.read_from(begin).index(pack(record))
                    write_in_place(self.path, pack(record), at)
                    self._failed = False
                    return
            self._failed = True
            self._write(record)
            self._failed = False

        def put_or_give_back() -> None:
            try:
                put()
            except OSError as error:
                if not is_full(error) or not self._ballast.exists():
                    raise
                # The shard is already on disk; give back the reserve so that it can be committed.
                self._ballast.unlink()
                self._has_ballast = False
                put()

        patiently(self.path, put_or_give_back, small=True)
        return found + self._catch_up()

    def _write(self, record: CommitRecord) -> None:
        data, size = pack(record), current_size(self._fd)
        if size > self._end:  # the torn tail of a dead owner
            cut = CommitRecord(RecordKind.CUT, self._fences.current, 0, length=self._end)
            data = bytes(-size % RECORD_BYTES) + pack(cut) + data
        pwrite_all(self._fd, data, size)
        os.fsync(self._fd)
