"""Reads, follows and writes the plan: which rows each step trains on, one log per trainer
incarnation.

Each incarnation claims the next fence. Its log begins with the fence it continues and the number of
records it keeps, which cuts off all that a fenced predecessor appends later.

A snapshot sums up the front of the plan and of the commit logs, so the cost of a restart depends on
live data, not on the length of the run. A snapshot may be lost: the logs hold everything.
"""

import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.durable import GrowingFile
from relax_hpc.bus.frames import Record, decode, read_frames
from relax_hpc.errors import BusError, without_number
from relax_hpc.runtime.files.records import read_bytes, sync, write_json
from relax_hpc.runtime.files.storage import exists, names, patiently
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import ColumnWriter

KEPT = 2


class GuidSet:
    """A set of guids: all below a bound, and some above it."""

    def __init__(self, below: int = 0, above: Iterable[int] = ()) -> None:
        self.below = below
        self.above = set(above)

    def __contains__(self, guid: int) -> bool:
        return guid < self.below or guid in self.above

    def update(self, guids: Iterable[int]) -> None:
        self.above.update(guids)
        while self.below in self.above:
            self.above.remove(self.below)
            self.below += 1


class LogPosition(NamedTuple):
    """The finished front of a commit log."""

    records: int
    """Leading records that are finished."""
    fence: int
    """Fence of the owner there."""
    settled: list[str]
    """uuids of later finished shards."""


class PlanSnapshot(NamedTuple):
    """The plan up to and including `step`. Everything else begins after it."""

    fence: int
    """Plan fence whose log the last record of `step` stands in."""
    records: int
    """Records of the chain that it sums up."""
    end: int
    """Byte at which they end in the log of `fence`."""
    step: int
    planned_below: int
    """All guids below are planned or skipped."""
    planned_above: list[int]
    """The planned or skipped guids above."""
    dropped: list[tuple[int, str]]
    """(guid, uuid) of drops that still matter; guid -1 is the whole shard."""
    on_record: list[tuple[str, int, int]]
    """(uuid, guid, rows) of shards that still matter: used or passed over, -2 as repeated."""
    duplicates: int
    logs: dict[str, LogPosition]
    skipped_below: int = 0
    """Number of skipped guids below."""
    skipped_above: Sequence[int] = ()
    """The skipped guids above."""


NOTHING = PlanSnapshot(0, 0, 0, 0, 0, [], [], [], 0, {})
"""An empty run."""


def write_snapshot(paths: BusPaths, snapshot: PlanSnapshot) -> None:
    """Publishes a snapshot and deletes all but the newest ones.

    Raises:
        BusError: storage refused, or a newer trainer removed the draft.
    """
    path = paths.plan_snapshot(snapshot.fence, snapshot.records)
    try:
        write_json(path, snapshot._asdict())
        for old in [paths.plan / name for name in _files(paths)[KEPT:]]:
            patiently(old, partial(old.unlink, missing_ok=True))
    except OSError as error:
        raise BusError(f"{path}: cannot be written: {error.strerror}") from error


def remove_drafts(paths: BusPaths) -> None:
    for draft in [paths.plan / name for name in names(paths.plan)]:
        if draft.match(".snap.*.tmp"):
            patiently(draft, partial(draft.unlink, missing_ok=True))


def read_snapshots(paths: BusPaths) -> list[PlanSnapshot]:
    found = []
    for name in _files(paths):
        try:
            found.append(_parse(json.loads(read_bytes(paths.plan / name))))
        except FileNotFoundError:  # its writer had a newer one
            continue
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            said = f"cannot be read: {without_number(error)}; delete it"
            raise BusError(f"{paths.plan / name}: {said}") from error
    return found


def _parse(values: dict[str, Any]) -> PlanSnapshot:
    logs = {name: LogPosition(*position) for name, position in values.pop("logs").items()}
    dropped = [(guid, uuid) for guid, uuid in values.pop("dropped")]
    on_record = [tuple(entry) for entry in values.pop("on_record")]
    return PlanSnapshot(**values, dropped=dropped, on_record=on_record, logs=logs)


def _files(paths: BusPaths) -> list[str]:
    """Returns the files, newest first: the names sort by the records they sum up."""
    listed = (name for name in names(paths.plan) if fnmatchcase(name, "snap.*.json"))
    return sorted(listed, reverse=True)


_LOG = re.compile(r"f\d+\.log")


class ShardRange(NamedTuple):
    """The rows of one prompt group, in one shard: lo <= row < hi."""

    producer: str
    fence: int
    seq: int
    uuid: str
    lo: int
    hi: int


class Sidecar(NamedTuple):
    """A shard with further columns of another one."""

    writer: str
    fence: int
    seq: int
    uuid: str


class PlanRecord(NamedTuple):
    """One batch, or a portion of one; `_asdict()` is JSON. The audit needs no shard."""

    step: int
    guids: list[int]
    parts: list[ShardRange]
    """The rows of `guids`, one part per prompt group, by (guid, sibling, segment)."""
    num_trajectories: int
    policy_version_min: int
    num_tokens: int
    portion: int = 0
    """0-based within the step."""
    last: bool = True
    sidecars: Mapping[str, dict[ColumnWriter, Sidecar]] = MappingProxyType({})
    """uuid of a shard of `parts` -> role -> the sidecar that counts."""

    @classmethod
    def from_json(cls, record: Record) -> Self:
        sidecars = {
            uuid: {role: Sidecar(*sidecar) for role, sidecar in roles.items()}
            for uuid, roles in record["sidecars"].items()
        }
        parts = [ShardRange(*part) for part in record["parts"]]
        return cls(**{**record, "parts": parts, "sidecars": sidecars})


class IgnoredShard(NamedTuple):
    """Rows that were committed again because a producer lost its acknowledgement."""

    uuid: str
    rows: int


class DroppedGroup(NamedTuple):
    """Rows that will not be trained on; their owner samples the prompt again."""

    guid: int
    """-1: every group of the shard, which cannot be read."""
    dropped: str
    rows: int
    why: str
    """`over_age` or `damaged`."""
    step: int


class SkippedGroup(NamedTuple):
    """Rows that will not be trained on because they teach nothing; further groups take their place.

    Their owner may delete them, as if they had been trained on.
    """

    guid: int
    skipped: str
    rows: int
    step: int
    prompt: int
    solved: bool
    """Whether the policy always solves it already; else it never does."""
    reward: float | None
    """Mean over the episodes that have one; None if none has."""
    truncated: bool = False
    """Whether it was skipped because its responses were cut off."""
    retired: bool = False
    """Whether it was never sampled, since its prompt has been solved often enough."""


AnyRecord = PlanRecord | IgnoredShard | DroppedGroup | SkippedGroup


class PlanPosition(NamedTuple):
    fence: int
    records: int
    """Records of the chain up to and including the last one of `step`."""
    step: int


class ChainRecord(NamedTuple):
    record: AnyRecord
    fence: int
    end: int
    """Byte at which it ends in the log of `fence`."""


class Chain(NamedTuple):
    """The one valid history: records of all fences, without the parts cut off."""

    fence: int
    """Newest fence with a header; 0 if nothing was ever planned."""
    base: PlanSnapshot
    """Sums up the records before `records`."""
    records: list[ChainRecord]
    links: list[tuple[int, int]]
    """(fence, records it kept of the fences before), oldest first."""

    @property
    def steps(self) -> list[PlanRecord]:
        return [r.record for r in self.records if isinstance(r.record, PlanRecord)]

    @property
    def ignored(self) -> list[IgnoredShard]:
        return [r.record for r in self.records if isinstance(r.record, IgnoredShard)]

    @property
    def dropped(self) -> list[DroppedGroup]:
        return [r.record for r in self.records if isinstance(r.record, DroppedGroup)]

    @property
    def skipped(self) -> list[SkippedGroup]:
        return [r.record for r in self.records if isinstance(r.record, SkippedGroup)]

    @property
    def num_records(self) -> int:
        return self.base.records + len(self.records)

    def check(self, position: PlanPosition) -> None:
        """Raises:
        BusError: `position` is not on this chain; its checkpoint came from a fenced trainer.
        """
        later = [keep for fence, keep in self.links if fence > position.fence]
        known = position.fence in [fence for fence, _ in self.links] or position.records == 0
        step = -1
        if position.records == self.base.records:
            step = self.base.step
        elif self.base.records < position.records <= min([self.num_records, *later]):
            record = self.records[position.records - 1 - self.base.records].record
            step = record.step if isinstance(record, PlanRecord) and record.last else -1
        if step != position.step or not known:
            raise BusError(
                f"the checkpoint's plan position {tuple(position)} is not in this run's plan "
                f"(fences {self.links}): a fenced trainer or another run wrote it, or no shard of "
                "that time is left; resume from another checkpoint"
            )


def newest_fence(paths: BusPaths) -> int:
    """Returns the highest claim; only its owner's plan counts."""
    claims = [name for name in names(paths.plan) if name.startswith("FENCE.")]
    return max((int(claim.removeprefix("FENCE.")) for claim in claims), default=0)


def claim_fence(paths: BusPaths) -> int:
    """Takes the next fence; O_EXCL gives each number to one of two racing trainers.

    Raises:
        BusError: the folder of the plan cannot be written.
    """
    fence = newest_fence(paths)
    while True:
        fence += 1
        claim = paths.plan_claim(fence)
        try:
            # If storage says no to one that it made, the next attempt finds it there: a gap.
            patiently(claim, partial(_make_claim, claim), small=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise BusError(f"{claim}: cannot be made: {error.strerror}") from error
        return fence


def _make_claim(claim: Path) -> None:
    os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    sync(claim.parent)


def read_chain(paths: BusPaths, *, below: int | None = None, whole: bool = True) -> Chain:
    """Reads the valid plan, of the newest fence or of the newest one below `below`.

    Args:
        whole: every record; else those after the newest snapshot on the chain.

    Raises:
        BusError: a record of the plan is damaged.
    """
    newest = newest_fence(paths) if below is None else below - 1
    for snapshot in [] if whole else read_snapshots(paths):
        if snapshot.fence <= newest and (chain := _read(paths, newest, snapshot)):
            return chain
    chain = _read(paths, newest, NOTHING)
    assert chain is not None
    return chain


def read_chain_behind(paths: BusPaths, base: PlanSnapshot) -> Chain | None:
    """Reads the valid plan from a place on; None if the plan no longer contains the place.

    Args:
        base: gives the place by `fence`, `records` and `end`; a restart may have cut it off.

    Raises:
        BusError: a record of the plan is damaged.
    """
    return _read(paths, newest_fence(paths), base)


def is_planned(paths: BusPaths, position: PlanPosition) -> bool:
    """Whether a checkpoint's position is on the valid plan.

    Raises:
        BusError: a record of the plan is damaged.
    """
    chain = read_chain(paths, whole=False)
    try:
        chain.check(position)
    except BusError:
        return False
    return True


def gone_of_first_step(paths: BusPaths) -> Path | None:
    """Returns a deleted shard of the batch of step 1; None if that step can still be trained, or
    has never been."""
    first = (record for record in read_chain(paths).steps if record.step == 1)
    shards = (paths.shard(p.producer, p.fence, p.seq) for record in first for p in record.parts)
    return next((shard for shard in shards if not exists(shard)), None)


def _read(paths: BusPaths, fence: int, base: PlanSnapshot) -> Chain | None:
    """Returns the chain that ends at `fence` and begins after `base`; None if `base` is not on
    it."""
    listed = [paths.plan / name for name in names(paths.plan) if _LOG.fullmatch(name)]
    logs = {int(log.stem[1:]): log for log in listed}
    segments = []
    while fence > base.fence:
        frames = read_frames(logs[fence]) if fence in logs else []
        if not frames:  # claimed, but its owner died before it wrote the header
            fence -= 1
            continue
        (header, _), *records = frames
        segments.append((fence, int(header["keep"]), records))
        fence = header["parent"]
    if fence < base.fence or any(keep < base.records for _, keep, _ in segments):
        return None
    if base.fence:
        segments.append((base.fence, base.records, read_frames(logs[base.fence], base.end)))
    chain: list[ChainRecord] = []
    for owner, keep, records in reversed(segments):
        if keep > (there := base.records + len(chain)):
            raise BusError(
                f"{paths.plan_log(owner)}: continues a plan of {keep} records, of which {there} "
                "are there; restore the logs of the fences before it"
            )
        found = [ChainRecord(parse(record), owner, end) for record, end in records]
        chain = chain[: keep - base.records] + found
    links = [(owner, keep) for owner, keep, _ in reversed(segments)]
    return Chain(segments[0][0] if segments else 0, base, chain, links)


def parse(record: Record) -> AnyRecord:
    if "parts" in record:
        return PlanRecord.from_json(record)
    if "skipped" in record:
        return SkippedGroup(**record)
    return DroppedGroup(**record) if "dropped" in record else IgnoredShard(**record)


class PlannedBatch(NamedTuple):
    """A whole step, in however many portions it was planned; rows count in their order."""

    step: int
    parts: list[ShardRange]
    sidecars: dict[str, dict[ColumnWriter, Sidecar]]


class PlanTail:
    """Returns each valid record of the plan once, as it arrives.

    A record counts if the credits, read after it, show no newer trainer than the one whose log
    holds it. Every trainer writes a credit before it reads the plan to continue, so a later trainer
    finds this record and keeps it.

    Args:
        credits: of the trainer; polled anew each time.
        check: called with the plan whenever another trainer continues it.
    """

    def __init__(
        self,
        paths: BusPaths,
        credits: CreditTail,
        *,
        num_records: int = 0,
        check: Callable[[Chain], None] = lambda _: None,
    ) -> None:
        self._paths, self._credits, self._check = paths, credits, check
        self.fence = 0
        """Fence of the trainer whose log is read."""
        self._end, self._num_read, self._num_given = 0, 0, num_records
        self._log: GrowingFile | None = None
        self._fresh: list[tuple[int, AnyRecord]] = []

    def look(self) -> list[tuple[int, AnyRecord]] | None:
        """Returns the records since the last call, each with its number, from 1.

        None until the newest trainer has recorded how much of the plan it keeps.

        Raises:
            BusError: the plan is damaged, or `check` rejects it.
        """
        self._credits.latest()
        if self._credits.plan_fence != self.fence and not self._follow(self._credits.plan_fence):
            return None
        if self._log is None:
            return None
        records, size = decode(self._log.read_from(self._end), self._log.path, self._end)
        if not self._is_newest():
            return None  # a newer trainer may cut off what was read
        is_header = self._end == 0 and bool(records)
        self._end += size
        self._count([parse(record) for record in records[is_header:]])
        found, self._fresh = self._fresh, []
        return found

    def close(self) -> None:
        if self._log:
            self._log.close()

    def _follow(self, fence: int) -> bool:
        """Switches to a trainer's log, once that says how much of the plan it keeps."""
        chain = read_chain(self._paths, whole=False)
        if chain.fence != fence or not self._is_newest():
            return False
        self._check(chain)
        if chain.base.records > self._num_given:  # some are summed up that were not given
            chain = read_chain(self._paths, below=fence + 1)
            if not self._is_newest():
                return False  # a newer trainer may cut off what was read
        self.close()
        self._log = GrowingFile(self._paths.plan_log(fence))
        self.fence, self._end = fence, chain.base.end if chain.base.fence == fence else 0
        self._num_read = chain.base.records
        self._count([each.record for each in chain.records])
        if chain.records and chain.records[-1].fence == fence:
            self._end = chain.records[-1].end
        return True

    def _is_newest(self) -> bool:
        fence = self._credits.plan_fence
        self._credits.latest()
        return self._credits.plan_fence == fence

    def _count(self, records: Sequence[AnyRecord]) -> None:
        """Takes the next records of the plan, some of which may have been returned before."""
        for number, record in enumerate(records, self._num_read + 1):
            if number > self._num_given:
                self._fresh.append((number, record))
        self._num_read += len(records)
        self._num_given = max(self._num_read, self._num_given)


class PlanFollower:
    """Returns batch after batch, each once its last portion is planned.

    Args:
        credits: of the trainer; polled anew each time.
        position: after the last batch to leave out; None begins with step 1.
    """

    def __init__(
        self, paths: BusPaths, credits: CreditTail, position: PlanPosition | None = None
    ) -> None:
        self._position = position or PlanPosition(0, 0, 0)
        self._tail = PlanTail(
            paths,
            credits,
            num_records=self._position.records,
            check=lambda chain: chain.check(self._position),
        )
        self._portions: list[PlanRecord] = []
        self._ready: deque[tuple[PlannedBatch, PlanPosition]] = deque()

    @property
    def position(self) -> PlanPosition:
        return self._position

    def next_batch(self) -> PlannedBatch | None:
        """Returns the next batch; None while it is not planned.

        Raises:
            BusError: the plan is damaged, or `position` is not on it.
        """
        if not self._ready:
            self._look()
        if not self._ready:
            return None
        batch, self._position = self._ready.popleft()
        return batch

    def close(self) -> None:
        self._tail.close()

    def _look(self) -> None:
        for number, record in self._tail.look() or ():
            if not isinstance(record, PlanRecord):
                continue
            self._portions.append(record)
            if record.last:
                position = PlanPosition(self._tail.fence, number, record.step)
                self._ready.append((_batch_of(self._portions), position))
                self._portions = []


def _batch_of(portions: Sequence[PlanRecord]) -> PlannedBatch:
    sidecars = {uuid: roles for each in portions for uuid, roles in each.sidecars.items()}
    parts = [part for each in portions for part in each.parts]
    return PlannedBatch(portions[0].step, parts, sidecars)
