"""Everything that lies on a bus: the writers' records, joined with the files in their folders.

Every tool for people begins here. Nobody is disturbed: logs are read as every reader reads them,
and only tools list folders.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from relax_hpc.bus import layout
from relax_hpc.bus.credits import Credit, CreditTail
from relax_hpc.bus.log import SHARDS, CommitRecord, RecordKind, read_log
from relax_hpc.paths import BusPaths
from relax_hpc.schema import PRODUCER, Role


class File(NamedTuple):
    path: Path
    nbytes: int
    modified: float
    """Seconds since 1970, by the clock of the file system; to be shown, never to be relied on."""


class Writer(NamedTuple):
    """A producer or sidecar writer."""

    name: str
    role: Role
    log: list[CommitRecord]
    files: dict[Path, File]
    """Files in its fence folders, as of before `log` was read."""

    @property
    def shards(self) -> list[CommitRecord]:
        """Committed shards, in the order of their commits."""
        return [record for record in self.log if record.kind in SHARDS]

    @property
    def fence(self) -> int:
        return max((record.fence for record in self.log), default=0)

    @property
    def is_closed(self) -> bool:
        return bool(self.log) and self.log[-1].kind is RecordKind.CLOSE


def writers_of(header: layout.BusHeader) -> dict[str, Role]:
    """Everybody who has a log on this bus."""
    return {**dict.fromkeys(header.producers, PRODUCER), **header.sidecar_writers}


def take(paths: BusPaths, name: str, role: Role) -> Writer:
    """Looks at one writer.

    Raises:
        BusError: no such log, or a committed record of it is damaged.
    """
    files = {file.path: file for file in _list(paths.producer(name))}
    return Writer(name, role, read_log(paths.log(name)), files)


def take_all(paths: BusPaths) -> list[Writer]:
    """Looks at every writer.

    Raises:
        BusError: not a bus of this format, or a damaged log.
    """
    header = layout.open_bus(paths)
    return [take(paths, name, role) for name, role in writers_of(header).items()]


def unrecorded(paths: BusPaths, writer: Writer) -> list[File]:
    """Files that no record names: orphans, drafts, and perhaps a shard about to be committed."""
    known = {paths.shard(writer.name, r.fence, r.seq) for r in writer.shards}
    return [file for path, file in writer.files.items() if path not in known]


def newest_credit(paths: BusPaths) -> Credit | None:
    """Reads the trainer's newest grant; None before it has started."""
    tail = CreditTail(paths)
    try:
        return tail.latest()
    finally:
        tail.close()


def latest_credit(paths: BusPaths) -> Credit:
    """Reads the trainer's newest grant; a first one of nothing before it has started."""
    return newest_credit(paths) or Credit()


def _list(folder: Path) -> Iterator[File]:
    for fence in sorted(folder.glob("f*")):
        for path in sorted(fence.iterdir()) if fence.is_dir() else []:
            try:
                facts = path.stat()
            except FileNotFoundError:  # its owner just deleted it
                continue
            yield File(path, facts.st_size, facts.st_mtime)
