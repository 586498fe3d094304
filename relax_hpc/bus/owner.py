"""Base of producers and sidecar writers: a process with its own log and shards."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from relax_hpc.bus import layout
from relax_hpc.bus.durable import BusFullError, close_flushed
from relax_hpc.bus.log import SHARDS, CommitRecord, LogWriter, RecordKind
from relax_hpc.bus.shards import shard_write
from relax_hpc.bus.shards.shard_format import ShardInfo
from relax_hpc.errors import BusError
from relax_hpc.runtime.files.records import sync
from relax_hpc.runtime.files.storage import names, patiently
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import PRODUCER, ColumnPieces, ColumnWriter

log = logging.getLogger(__name__)

_RESERVED = {
    "rl_shard_format", "shard_uuid", "n_samples", "producer", "fence", "seq", "role",
    "policy_min", "policy_max", "parent",
}  # fmt: skip
_NO_PARENT = "0" * 32


class Owner:
    """The one process that writes below `p/<name>`. Opening it fences the previous one.

    Args:
        name: one of the names it was made with.
        spares: number of obsolete shards to keep for overwriting; 0 if columns are compressed.

    Raises:
        BusError: not a bus of this format, no such name with this role, or a damaged log.
    """

    def __init__(
        self,
        paths: BusPaths,
        name: str,
        role: ColumnWriter,
        provenance: Mapping[str, str | int],
        *,
        compress: Iterable[str] = (),
        spares: int = 0,
    ) -> None:
        if clash := _RESERVED & provenance.keys():
            raise BusError(f"provenance of {name}: {sorted(clash)} are the bus's own attributes")
        header = layout.open_bus(paths)
        roles = dict.fromkeys(header.producers, PRODUCER) | dict(header.sidecar_writers)
        if roles.get(name) != role:
            raise BusError(f"{paths.header}: has no {_kind(role)} {name}; it has {roles}")
        self.name, self.role = name, role
        self._paths = paths
        self._provenance, self._compress = dict(provenance), frozenset(compress)
        # Where chunks of a compressed column lie, and their checksums, is read from the file each
        # time: whoever has it open would get those of another shard without a word.
        self._num_spares, self._spares = 0 if self._compress else spares, list[Path]()
        # The claim comes first: from here on whatever older fences left unrecorded stays so.
        self._log = LogWriter(paths.log(name))
        self.fence, self._seq = self._log.fence, self._log.next_seq
        self._folder = self._make_folder(paths.fence(name, self.fence))
        self._live = self._clean()
        """Records whose file exists."""
        self._log.records.clear()  # of all shards since the run began

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def shard(self, record: CommitRecord) -> Path:
        return self._paths.shard(self.name, record.fence, record.seq)

    def close(self) -> None:
        self._drop_spares()
        self._log.append(CommitRecord(RecordKind.CLOSE, self.fence, self._seq, self.role))
        self._release()

    def _release(self) -> None:
        self._log.close()
        close_flushed(self._folder)

    @staticmethod
    def _make_folder(folder: Path) -> int:
        """Returns a descriptor of the folder, to flush its names without a look-up per shard."""

        def make() -> int:
            folder.mkdir(exist_ok=True)
            sync(folder.parent)
            return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

        try:
            return patiently(folder, make)
        except OSError as error:
            raise BusError(f"{folder}: cannot be made: {error.strerror}") from error

    def _publish(
        self,
        record: CommitRecord,
        columns: ColumnPieces,
        attributes: Mapping[str, str] = MappingProxyType({}),
    ) -> CommitRecord:
        """Writes a shard and commits it; fills in the fields of `record` that depend on the
        file."""
        try:
            info = self._write(record, columns, attributes)
        except BusFullError:
            if not self._spares:
                raise
            self._drop_spares()
            info = self._write(record, columns, attributes)
        except BusError:
            self._log.check_fenced()  # whoever took over deletes what lies in this owner's folder
            raise
        record = record._replace(
            uuid=info.uuid, length=info.length, rows=info.rows, tokens=info.tokens
        )
        self._log.append(record)
        self._live.append(record)
        self._seq += 1
        return record

    def _write(
        self, record: CommitRecord, columns: ColumnPieces, attributes: Mapping[str, str]
    ) -> ShardInfo:
        parent = "" if record.parent == _NO_PARENT else record.parent
        return shard_write.write(
            self.shard(record),
            columns,
            self._provenance
            | {"producer": self.name, "fence": record.fence, "seq": record.seq}
            | {"role": self.role, "parent": parent}
            | {"policy_min": record.policy_version_min, "policy_max": record.policy_version_max}
            | dict(attributes),
            compress=self._compress,
            folder=self._folder,
            spare=self._spares.pop() if self._spares else None,
        )

    def _drop_spares(self) -> None:
        while self._spares:
            _delete_orphan(self._spares.pop())

    def _delete(self, dead: Callable[[CommitRecord], bool]) -> set[str]:
        """Deletes own shards, or keeps them as spares; returns their uuids.

        Failed deletions are retried later.
        """
        uuids = set()
        for record in [record for record in self._live if dead(record)]:
            try:
                if len(self._spares) < self._num_spares:
                    self._spares.append(self.shard(record))
                else:
                    self.shard(record).unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s: cannot be deleted now: %s", self.shard(record), error.strerror)
                continue
            uuids.add(record.uuid)
        self._live = [record for record in self._live if record.uuid not in uuids]
        if uuids:
            self._log.restore_ballast()
        return uuids

    def _forget_shard(self, record: CommitRecord) -> None:
        """Treats an unreadable shard as not written; its file stays for inspection."""
        self._live.remove(record)

    def _clean(self) -> list[CommitRecord]:
        """Deletes unrecorded files of older fences; returns the records whose file exists.

        Listing is cheap here: the folders are this owner's own, and it lists once. Folders of later
        fences are left alone; they exist if this owner was stopped for a while.
        """
        recorded = {self.shard(r): r for r in self._log.records if r.kind in SHARDS}
        live = []
        for fence in range(1, self.fence):
            folder = self._paths.fence(self.name, fence)
            for file in [folder / name for name in names(folder)]:
                if file in recorded:
                    live.append(recorded[file])
                else:
                    _delete_orphan(file)
        return sorted(live, key=lambda record: record.seq)


def _delete_orphan(file: Path) -> None:
    """Deletes an orphan; one that stays is harmless (NFS keeps files that this host has open)."""
    try:
        file.unlink(missing_ok=True)  # another owner may be at it, too
    except OSError as error:
        log.warning("%s: an orphan cannot be deleted: %s", file, error.strerror)


def _kind(role: ColumnWriter) -> str:
    return "producer" if role == PRODUCER else f"sidecar writer of role {role}"
