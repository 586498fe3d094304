"""Appending to a commit log: durable, fenced, and possible on a full file system."""

import os
import uuid as uuidlib
from pathlib import Path

from relax_hpc.bus.durable import close_flushed, is_full, pwrite_all, write_in_place
from relax_hpc.bus.log import RECORD_BYTES, CommitRecord, Fences, RecordKind, decode, pack
from relax_hpc.bus.tail import GrowingFile, current_size
from relax_hpc.errors import BusError, FencedError
from relax_hpc.records import sync
from relax_hpc.storage import PASSING, delete, exists, patiently

BALLAST_BYTES = 256 << 10


class LogWriter:
    """The owner of a log. Opening it takes the log over: the owner before is fenced.

    The log grows with each record: a change of size is what every client cache revalidates on.
    Appends go to the end of the file, wherever that is by then, so that two live owners cannot
    overwrite each other; whose record counts is decided by the order of the OPEN records.

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
        """Valid records of the owners before."""
        self.fence = self._take_over()
        self._has_ballast = exists(self._ballast)
        self.restore_ballast()

    @property
    def next_seq(self) -> int:
        """Number of the first shard behind `records`."""
        return max((r.seq for r in self.records if r.rows), default=-1) + 1

    def append(self, record: CommitRecord) -> None:
        """Commits `record`: on return it is on disk.

        Raises:
            FencedError: another process took this log over; this one must end.
            BusError: an append failed and what is on disk is unknown; restarting the producer
                finds out.
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
        """Reserves the space that an append may need on a full file system, if there is some."""
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
        """Appends an OPEN that counts; of two racing owners one has to go higher."""
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
        """The valid ones among the records that are new."""
        data = self._file.read_from(self._end)
        records = decode(data, self.path, self._end // RECORD_BYTES)
        self._end += len(records) * RECORD_BYTES
        return [record for record in records if self._fences.admit(record)]

    def _put(self, record: CommitRecord) -> list[CommitRecord]:
        """Appends a record, once, and returns the valid ones that are new.

        Raises:
            OSError: storage refuses, and what is on disk is unknown.
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
