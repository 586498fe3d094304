"""Finds what is on a bus: writers' records with the files in their folders, strays, prompt groups.

Every tool for people begins here. It disturbs nobody: logs are read as every reader reads them, and
only tools list folders. A prompt group is a plan record of its own, so every tool reads rows as the
trainer does: through `Reader`, sidecars included. A survey opens each shard once, and reports
rewards and deleted shards.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from relax_hpc.bus.credits import Credit, CreditTail
from relax_hpc.bus.layout import BusHeader, open_bus
from relax_hpc.bus.log import SHARDS, CommitRecord, RecordKind, read_log
from relax_hpc.bus.plan import Chain, PlanRecord, ShardRange, Sidecar, read_chain
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.errors import BusError, DamagedError
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import PRODUCER, ColumnWriter


class Finding(NamedTuple):
    kind: str
    """log, plan, credits, checkpoint, count, shard, missing or foreign; orphan."""
    where: str
    what: str
    harmful: bool = True
    """False for traces that any crash leaves and the protocol has handled."""


class FileEntry(NamedTuple):
    path: Path
    nbytes: int
    modified: float
    """Seconds since 1970, by the file system's clock; for display only."""


class CommittedShard(NamedTuple):
    writer: str
    record: CommitRecord
    path: Path
    file: FileEntry | None
    """None if it is gone, or was written after the folder was listed."""

    @property
    def place(self) -> tuple[str, int, int, str]:
        return (self.writer, self.record.fence, self.record.seq, self.record.uuid)

    @property
    def is_there(self) -> bool:
        return self.file is not None or self.path.exists()


class Writer(NamedTuple):
    name: str
    role: ColumnWriter
    log: list[CommitRecord]
    shards: list[CommittedShard]
    files: list[FileEntry]
    """Files in its fence folders, listed before `log` was read."""
    unrecorded: list[FileEntry]
    """Files without a record: orphans, drafts, and perhaps a shard about to be committed."""

    @property
    def fence(self) -> int:
        return max((record.fence for record in self.log), default=0)

    @property
    def is_closed(self) -> bool:
        return bool(self.log) and self.log[-1].kind is RecordKind.CLOSE


def writers_of(header: BusHeader) -> dict[str, ColumnWriter]:
    return {**dict.fromkeys(header.producers, PRODUCER), **header.sidecar_writers}


def read_writer(paths: BusPaths, name: str, role: ColumnWriter) -> Writer:
    """Reads one writer.

    Raises:
        BusError: no such log, or a committed record of it is damaged.
    """
    files = {file.path: file for file in _list(paths.producer(name))}
    log = read_log(paths.log(name))
    places = [(r, paths.shard(name, r.fence, r.seq)) for r in log if r.kind in SHARDS]
    shards = [CommittedShard(name, record, path, files.get(path)) for record, path in places]
    known = {shard.path for shard in shards}
    unrecorded = [file for path, file in files.items() if path not in known]
    return Writer(name, role, log, shards, list(files.values()), unrecorded)


def read_writers(paths: BusPaths) -> list[Writer]:
    """Reads every writer.

    Raises:
        BusError: not a bus of this format, or a damaged log.
    """
    header = open_bus(paths)
    return [read_writer(paths, name, role) for name, role in writers_of(header).items()]


def newest_credit(paths: BusPaths) -> Credit | None:
    """Reads the trainer's newest grant; None before it has started."""
    tail = CreditTail(paths)
    try:
        return tail.latest()
    finally:
        tail.close()


def _list(folder: Path) -> Iterator[FileEntry]:
    for fence in sorted(folder.glob("f*")):
        for path in sorted(fence.iterdir()) if fence.is_dir() else []:
            try:
                facts = path.stat()
            except FileNotFoundError:  # its owner just deleted it
                continue
            yield FileEntry(path, facts.st_size, facts.st_mtime)


_SHARD = re.compile(r"\d{12}\.h5")
_FENCE = re.compile(r"f\d+")
_PLAN = re.compile(r"FENCE\.\d{6}|f\d{6}\.log|snap\.\d+\.\d+\.json")
_OWN = ("log", "ballast")


def find_strays(paths: BusPaths, header: BusHeader, writers: Sequence[Writer]) -> Iterator[Finding]:
    """Reports files that neither `layout` nor a record accounts for.

    Drafts and shards without a record are no error: their writer is at work, or it died and deletes
    them at its next start.
    """
    owners = writers_of(header)
    for writer in writers:
        for file in writer.unrecorded:
            yield _describe_unrecorded(file)
        yield from _unknown(
            paths.producer(writer.name), lambda n: n in _OWN or bool(_FENCE.fullmatch(n))
        )
    yield from _unknown(paths.producer("x").parent, lambda name: name in owners)
    yield from _unknown(paths.plan, lambda name: bool(_PLAN.fullmatch(name)))
    yield from _unknown(paths.credits.parent, lambda name: name == paths.credits.name)
    known = (paths.header.name, paths.plan.name, paths.credits.parent.name, "p")
    yield from _unknown(paths.root, lambda name: name in known)


def is_orphan(file: FileEntry) -> bool:
    return file.path.name.startswith(".") or bool(_SHARD.fullmatch(file.path.name))


def _describe_unrecorded(file: FileEntry) -> Finding:
    if is_orphan(file):
        what = "no record names it: unfinished, or left by a crash; its writer's next start and "
        return Finding("orphan", str(file.path), f"{what}relax-hpc bus gc delete it", harmful=False)
    return _foreign(file.path)


def _unknown(folder: Path, is_known: Callable[[str], bool]) -> Iterator[Finding]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith("."):  # a draft of JSON, or what NFS keeps of an open file
            yield Finding("orphan", str(path), "is a draft that was not finished", harmful=False)
        elif not is_known(path.name):
            yield _foreign(path)


def _foreign(path: Path) -> Finding:
    return Finding("foreign", str(path), "is no file of a bus; move it elsewhere")


UNPLANNED = 0
"""Step of a prompt group that no step trains on, or not yet."""
MERGED_GROUPS = 16


def of_steps(paths: BusPaths, first: int, last: int) -> list[PlanRecord]:
    """Returns the plan records of some steps, in the trainer's order.

    Raises:
        BusError: not a bus of this format, a damaged plan, a step that is not planned, or one whose
            shards are deleted.
    """
    planned = read_chain(paths).steps
    newest = max((record.step for record in planned), default=0)
    if not 1 <= first <= last <= newest:
        held = f"steps 1 to {newest} are planned" if newest else "nothing is planned yet"
        asked = f"step {first}" if first == last else f"steps {first} to {last}"
        raise BusError(f"{paths.plan}: has no {asked}; {held}")
    return [record for record in planned if first <= record.step <= last]


def groups(record: PlanRecord) -> Iterator[PlanRecord]:
    """Yields a plan record for each prompt group of a batch, in its order."""
    return (group_of(record, index) for index in range(len(record.guids)))


def group_of(record: PlanRecord, index: int) -> PlanRecord:
    part = record.parts[index]
    return record._replace(
        guids=[record.guids[index]], parts=[part], num_trajectories=part.hi - part.lo
    )


def merge_records(records: Iterable[PlanRecord]) -> Iterator[PlanRecord]:
    """Merges a few neighbouring prompt groups of a step into one record, so that they are one
    read."""
    held: PlanRecord | None = None
    for record in records:
        if held is None or held.step != record.step or len(held.guids) >= MERGED_GROUPS:
            if held is not None:
                yield held
            held = record
            continue
        held = held._replace(
            guids=held.guids + record.guids,
            parts=held.parts + record.parts,
            num_trajectories=held.num_trajectories + record.num_trajectories,
            sidecars={**held.sidecars, **record.sidecars},
        )
    if held is not None:
        yield held


def on_disk(paths: BusPaths) -> Iterator[PlanRecord]:
    """Yields every committed prompt group on disk, producer by producer, in order of commits.

    Raises:
        BusError: not a bus of this format, a damaged log or plan, or a damaged shard.
    """
    writers = read_writers(paths)
    plan = _GroupRecords(read_chain(paths), writers)
    for base in _bases(writers):
        if base.file is not None:
            with Shard(base.path) as shard:
                groups = _parts_in(shard, base)
            yield from (plan.record_of(guid, part) for guid, part in groups)


def of_guid(paths: BusPaths, guid: int) -> PlanRecord:
    """Returns the prompt group as planned, or else as first committed.

    Raises:
        BusError: not a bus of this format, damage, or no such group.
    """
    chain = read_chain(paths)
    for record in chain.steps:
        if guid in record.guids:
            return group_of(record, record.guids.index(guid))
    writers = read_writers(paths)
    for base in _bases(writers):
        if base.record.guid_min <= guid <= base.record.guid_max:
            with Shard(base.path) as shard:
                groups = _parts_in(shard, base)
            for part in (part for found, part in groups if found == guid):
                return _GroupRecords(chain, writers).record_of(guid, part)
    raise BusError(f"{paths.root}: prompt group {guid} is not committed; see relax-hpc bus ls")


def _bases(writers: Iterable[Writer]) -> list[CommittedShard]:
    shards = [shard for writer in writers for shard in writer.shards]
    return [shard for shard in shards if shard.record.kind is RecordKind.BASE]


def _parts_in(shard: Shard, base: CommittedShard) -> list[tuple[int, ShardRange]]:
    """Returns the prompt groups of a shard: guid, and the rows that hold it."""
    guids = shard.read("row/guid").astype(np.int64)
    starts = np.flatnonzero(np.diff(guids, prepend=guids[0] - 1)).tolist()
    return [
        (int(guids[lo]), ShardRange(*base.place, lo, hi))
        for lo, hi in zip(starts, [*starts[1:], len(guids)], strict=True)
    ]


class _GroupRecords:
    """Makes the plan record of each prompt group on a bus."""

    def __init__(self, chain: Chain, writers: Sequence[Writer]) -> None:
        self._planned = {
            (part.uuid, part.lo): (record, index)
            for record in chain.steps
            for index, part in enumerate(record.parts)
        }
        self._sidecars: dict[str, dict[ColumnWriter, Sidecar]] = {}
        """uuid of a base shard -> role -> its sidecar: the first committed."""
        for shard in (shard for writer in writers for shard in writer.shards):
            if shard.record.kind is RecordKind.SIDE:
                of_base = self._sidecars.setdefault(shard.record.parent, {})
                of_base.setdefault(shard.record.role, Sidecar(*shard.place))

    def record_of(self, guid: int, part: ShardRange) -> PlanRecord:
        """Returns the group as planned; of step `UNPLANNED` if no step trains on it, or not yet."""
        if place := self._planned.get((part.uuid, part.lo)):
            return group_of(*place)
        return PlanRecord(
            step=UNPLANNED,
            guids=[guid],
            parts=[part],
            num_trajectories=part.hi - part.lo,
            policy_version_min=-1,
            num_tokens=0,
            sidecars={part.uuid: self._sidecars.get(part.uuid, {})},
        )


def find_deleted(paths: BusPaths, records: Sequence[PlanRecord]) -> dict[int, list[str]]:
    gone: dict[int, dict[str, None]] = {}
    for record in records:
        for part in record.parts:
            sidecars = record.sidecars.get(part.uuid, {}).values()
            for place in (part[:3], *(sidecar[:3] for sidecar in sidecars)):
                if not paths.shard(*place).exists():
                    gone.setdefault(record.step, {})[str(paths.shard(*place))] = None
    return {step: list(files) for step, files in gone.items()}


def check_on_disk(paths: BusPaths, records: Sequence[PlanRecord]) -> None:
    """Raises:
    BusError: names the first step that cannot be read back, and how shards are kept."""
    if gone := find_deleted(paths, records):
        step, files = min(gone.items())
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise BusError(
            f"step {step}: {files[0]}{more} of its shards are deleted, and so for {len(gone)} "
            "of the steps asked for; they go once a checkpoint covers them; bus.keep_steps keeps "
            "those of more steps"
        )


class Surveyed(NamedTuple):
    record: PlanRecord
    rewards: tuple[float, ...]
    """One per episode, by sibling, without masked ones."""
    prompt_index: int
    """Row of the prompt in the data; a later epoch samples it again."""

    @property
    def guid(self) -> int:
        return self.record.guids[0]

    @property
    def mean_reward(self) -> float | None:
        """Returns None if all have failed and are masked."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


class Survey(NamedTuple):
    groups: list[Surveyed]
    """Each guid once, rising: as planned, or else as first committed."""
    deleted_shards: int
    """Committed shards of trajectories that are deleted."""
    deleted_trajectories: int

    @property
    def is_empty(self) -> bool:
        return not self.groups and not self.deleted_shards


def survey(
    paths: BusPaths,
    *,
    step: int | None = None,
    guid: int | None = None,
    newest: int | None = None,
    masks_errors: bool = False,
) -> Survey:
    """Surveys a bus; a shard deleted meanwhile counts as deleted.

    Args:
        step: only prompt groups of this step.
        guid: only this prompt group.
        newest: only this many, of the highest guids; other shards are not opened.
        masks_errors: whether an episode whose reward failed has none.

    Raises:
        BusError: not a bus of this format, damage, or a step that is not planned.
    """
    writers = read_writers(paths)
    bases = _bases(writers)
    if guid is not None:
        bases = [base for base in bases if base.record.guid_min <= guid <= base.record.guid_max]
    if step is not None:
        planned = of_steps(paths, step, step)
        uuids = {part.uuid for record in planned for part in record.parts}
        bases = [base for base in bases if base.record.uuid in uuids]
    there = [base for base in bases if base.is_there]
    gone = len(bases) - len(there)
    gone_rows = sum(base.record.rows for base in bases) - sum(base.record.rows for base in there)
    groups: list[Surveyed] = []
    plan = _GroupRecords(read_chain(paths), writers)
    for base in there if newest is None else _newest(there, newest):
        try:
            groups += _survey_shard(base, plan, masks_errors=masks_errors)
        except DamagedError:
            if base.path.exists():
                raise
            gone, gone_rows = gone + 1, gone_rows + base.record.rows
    asked = [g for g in groups if guid in (None, g.guid) and step in (None, g.record.step)]
    return Survey(_each_once(asked)[-(newest or 0) :], gone, gone_rows)


def _newest(bases: Sequence[CommittedShard], count: int) -> list[CommittedShard]:
    """Returns the shards that hold the `count` highest guids: each adds at least its highest.

    Shards with the same highest guid are a commit and its repetition, and count as one.
    """
    highest = sorted({base.record.guid_max for base in bases}, reverse=True)[:count]
    return [base for base in bases if base.record.guid_max in highest]


def _survey_shard(
    base: CommittedShard, plan: _GroupRecords, *, masks_errors: bool
) -> Iterator[Surveyed]:
    with Shard(base.path) as shard:
        parts = _parts_in(shard, base)
        counts = shard.read("row/segment") == 0
        if masks_errors:
            counts &= shard.read("row/reward_error") == 0
        rewards = shard.read("row/rewards")
        prompts = shard.read("row/prompt_index")
    for guid, part in parts:
        rows = slice(part.lo, part.hi)
        yield Surveyed(
            plan.record_of(guid, part),
            tuple(rewards[rows][counts[rows]].tolist()),
            int(prompts[part.lo]),
        )


def _each_once(groups: Iterable[Surveyed]) -> list[Surveyed]:
    """Returns groups by rising guid; of repetitions the planned one, or else the first."""
    found: dict[int, Surveyed] = {}
    for group in groups:
        if group.guid not in found or (group.record.step and not found[group.guid].record.step):
            found[group.guid] = group
    return [found[guid] for guid in sorted(found)]
