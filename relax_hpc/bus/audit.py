"""Checks from the logs alone that every trajectory was used once; shards may be gone.

A count can be continued later: the plan and the logs only grow, unless a restart cuts the plan
back.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

from relax_hpc.bus import layout
from relax_hpc.bus.log import CommitRecord, LogTail, RecordKind
from relax_hpc.bus.plan import (
    NOTHING,
    AnyRecord,
    Chain,
    DroppedGroup,
    GuidSet,
    IgnoredShard,
    PlanRecord,
    read_chain_behind,
)
from relax_hpc.bus.staleness import staleness
from relax_hpc.runtime.paths import BusPaths


class BusAudit(NamedTuple):
    """Counts of trajectories, unless a field says otherwise."""

    committed: int
    planned: int
    planned_twice: int
    """Rows in more than one step of the valid plan, or more than once in one; must be 0."""
    duplicates: int
    """Committed again by a producer that lost its acknowledgement, and ignored."""
    dropped: int
    """Passed over by the plan, and not on record as duplicates or as sampled again; must be 0."""
    steps: int
    max_staleness: int
    """Largest staleness of a planned trajectory's oldest token; 0 if nothing was planned."""
    over_age: int = 0
    """Dropped because they came too late; the prompts were sampled again."""
    damaged: int = 0
    """In shards that could not be read; the prompts were sampled again."""
    skipped: int = 0
    """Passed over because they teach nothing; other prompts took their place."""
    retired: int = 0
    """Part of `skipped` that was never sampled: the prompt had been solved often enough."""


def audit(paths: BusPaths) -> BusAudit:
    """Counts, during the run or afterwards.

    Raises:
        BusError: not a bus of this format, or a damaged log.
    """
    return Tally.of(paths).counts()


@dataclass(slots=True)
class _Shard:
    """The facts of a shard that later records may refer to."""

    rows: int = -1
    """Committed; -1 if its commit was not seen."""
    guid_max: int = -1
    used: int = 0
    """Rows that were planned, skipped, or dropped and sampled again."""
    ignored: list[int] = field(default_factory=list)
    """Rows ignored by each record that ignores some."""

    @property
    def is_done(self) -> bool:
        return 0 <= self.rows <= self.used and not self.ignored


class _UnknownShardError(Exception):
    """A record refers to a shard that was already used up."""


class Tally:
    """Counts everything up to a place of the plan and of each log.

    Its record is small and JSON: shards that are used up are left out.
    """

    def __init__(self) -> None:
        self._base, self._logs = NOTHING, dict[str, tuple[int, int]]()
        self._sums = BusAudit(0, 0, 0, 0, 0, 0, 0)
        self._decided, self._skipped = GuidSet(), set[int]()
        """Guids that the plan has decided on; the skipped ones among them."""
        self._shards = dict[str, _Shard]()
        self._is_whole = True
        """Whether no shard was left out."""
        self.num_new_records = 0
        """Records of the plan that no earlier tally had counted."""

    @classmethod
    def of(cls, paths: BusPaths, record: Any = None) -> Self:  # noqa: ANN401 - from a file
        """Counts everything.

        Args:
            record: of an earlier tally of this bus, to continue; an invalid one is ignored.

        Raises:
            BusError: not a bus of this format, or a damaged log.
        """
        with suppress(_UnknownShardError, KeyError, TypeError, ValueError):
            tally = cls._from_record(record)
            if tally._read(paths):
                return tally
        tally = cls()
        tally._read(paths)
        return tally

    def counts(self) -> BusAudit:
        return self._sums._replace(
            duplicates=sum(
                min(rows, (shard.rows if shard.rows >= 0 else rows) - shard.used)
                for shard in self._shards.values()
                for rows in shard.ignored
            ),
            dropped=sum(
                max(shard.rows - shard.used - sum(shard.ignored), 0)
                for shard in self._shards.values()
                if shard.guid_max < self._decided.below
            ),
        )

    def to_record(self) -> dict[str, Any]:
        """Returns the record that `of` takes."""
        shards = {uuid: each for uuid, each in self._shards.items() if not each.is_done}
        return {
            "base": [self._base.fence, self._base.records, self._base.end],
            "logs": self._logs,
            "sums": list(self._sums),
            "decided": [self._decided.below, sorted(self._decided.above)],
            "skipped": sorted(self._skipped),
            "shards": {uuid: list(asdict(each).values()) for uuid, each in shards.items()},
        }

    @classmethod
    def _from_record(cls, record: dict[str, Any]) -> Self:
        tally = cls()
        fence, records, end = record["base"]
        tally._base = NOTHING._replace(fence=fence, records=records, end=end)
        tally._logs = {name: (count, owner) for name, (count, owner) in record["logs"].items()}
        tally._sums = BusAudit(*record["sums"])
        tally._decided, tally._skipped = GuidSet(*record["decided"]), set(record["skipped"])
        tally._shards = {uuid: _Shard(*each) for uuid, each in record["shards"].items()}
        tally._is_whole = False
        return tally

    def _read(self, paths: BusPaths) -> bool:
        """Counts new records; False if the plan was cut back."""
        names = layout.open_bus(paths).producers
        # Before the logs, so that what is planned is also committed.
        chain = read_chain_behind(paths, self._base)
        if chain is None:
            return False
        for name in names:
            self._commit(self._poll(paths, name))
        for each in chain.records:
            self._plan(each.record)
        self.num_new_records = len(chain.records)
        if chain.records:
            last = chain.records[-1]
            self._base = NOTHING._replace(fence=last.fence, records=chain.num_records, end=last.end)
        return True

    def _poll(self, paths: BusPaths, name: str) -> list[CommitRecord]:
        start, fence = self._logs.get(name, (0, 0))
        tail = LogTail(paths.log(name), start=start, fence=fence)
        try:
            found = tail.poll()
            self._logs[name] = (tail.num_records, tail.fence)
        finally:
            tail.close()
        return found

    def _commit(self, records: Iterable[CommitRecord]) -> None:
        committed = self._sums.committed
        for record in records:
            if record.kind is RecordKind.BASE:
                committed += record.rows
                self._shards[record.uuid] = _Shard(record.rows, record.guid_max)
        self._sums = self._sums._replace(committed=committed)

    def _shard(self, uuid: str) -> _Shard:
        if uuid not in self._shards and not self._is_whole:
            raise _UnknownShardError
        return self._shards.setdefault(uuid, _Shard())

    def _plan(self, record: AnyRecord) -> None:
        sums = self._sums
        if isinstance(record, PlanRecord):
            twice = 0
            for guid, part in zip(record.guids, record.parts, strict=True):
                rows = part.hi - part.lo
                twice += rows if guid in self._decided and guid not in self._skipped else 0
                self._decided.update((guid,))
                self._shard(part.uuid).used += rows
            version = record.policy_version_min
            self._sums = sums._replace(
                planned=sums.planned + record.num_trajectories,
                planned_twice=sums.planned_twice + twice,
                steps=sums.steps + record.last,
                max_staleness=max(
                    sums.max_staleness, staleness(record.step, version) if version >= 0 else 0
                ),
            )
        elif isinstance(record, IgnoredShard):
            self._shard(record.uuid).ignored.append(record.rows)
        elif isinstance(record, DroppedGroup):
            self._shard(record.dropped).used += record.rows
            if record.why in ("over_age", "damaged"):
                count = getattr(sums, record.why) + record.rows
                self._sums = sums._replace(**{record.why: count})
        else:
            if record.guid not in self._decided:
                self._skipped.add(record.guid)
                self._decided.update((record.guid,))
            self._shard(record.skipped).used += record.rows
            self._sums = sums._replace(
                skipped=sums.skipped + record.rows,
                retired=sums.retired + record.rows * record.retired,
            )


def count_used_rows(chain: Chain) -> Counter[str]:
    """Returns uuid of a shard -> rows that were planned, skipped, or dropped and sampled again."""
    used: Counter[str] = Counter()
    for step in chain.steps:
        for part in step.parts:
            used[part.uuid] += part.hi - part.lo
    for drop in chain.dropped:
        used[drop.dropped] += drop.rows
    for group in chain.skipped:
        used[group.skipped] += group.rows
    return used
