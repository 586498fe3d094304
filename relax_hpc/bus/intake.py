"""Tracks the committed shards for the sequencer: which holds which prompt group, how wide.

Admits each shard once. The first commit of a guid wins, and the first sidecar of a role.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from relax_hpc.bus.log import CommitRecord, LogTail, RecordKind
from relax_hpc.bus.plan import (
    Chain,
    DroppedGroup,
    GuidSet,
    IgnoredShard,
    LogPosition,
    PlanRecord,
    ShardRange,
    Sidecar,
    SkippedGroup,
)
from relax_hpc.bus.reader import BatchIndex
from relax_hpc.bus.shards.shard import OpenShards, Shard
from relax_hpc.bus.skips import GroupVerdict, Judge
from relax_hpc.errors import BusError, DamagedError
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import ColumnWriter

log = logging.getLogger(__name__)

MAX_DAMAGED = 8
"""Damaged shards of one producer after which the storage counts as broken."""
WHOLE_SHARD = -1
REPEATED = -2
"""Marks the guids of groups in a shard that were committed before."""


class WaitingGroup(NamedTuple):
    """A committed prompt group that waits for its step."""

    part: ShardRange
    policy_version_min: int
    num_tokens: int


class Intake:
    """Follows the commit logs.

    Args:
        sidecar_writers: name -> role of the sidecar writers.
        chain: plan of earlier incarnations; its groups are not offered again.
        shards: gets admitted shards, open, for the next reader.
        judge: decides which groups are skipped; None: none is.
    """

    def __init__(
        self,
        paths: BusPaths,
        producers: Sequence[str],
        sidecar_writers: Mapping[str, ColumnWriter],
        needs: Sequence[ColumnWriter],
        chain: Chain,
        shards: OpenShards,
        judge: Judge | None = None,
    ) -> None:
        self.waiting: dict[int, WaitingGroup] = {}
        self.notes: list[IgnoredShard | DroppedGroup | SkippedGroup] = []
        """Records to add to the plan; the sequencer empties the list."""
        self.planned = GuidSet(chain.base.planned_below, chain.base.planned_above)
        self.dropped = set(chain.base.dropped)
        """(guid, uuid) that no longer count."""
        self._shards, self._needs, self._judge = shards, needs, judge
        self._producers, self._writers = list(producers), sidecar_writers
        self._names = {name: RecordKind.BASE for name in producers} | {
            name: RecordKind.SIDE for name in sidecar_writers if sidecar_writers[name] in needs
        }
        self._tails: dict[str, LogTail] = {}
        self._live: dict[str, deque[tuple[int, CommitRecord]]] = {}
        self._settled: set[str] = set()
        for name in self._names:
            position = chain.base.logs.get(name, LogPosition(0, 0, []))
            self._tails[name] = LogTail(
                paths.log(name), start=position.records, fence=position.fence
            )
            self._live[name] = deque()
            self._settled.update(position.settled)
        self._sidecars: dict[str, dict[ColumnWriter, Sidecar]] = {}
        self._repeats: dict[int, list[str]] = {}
        """guid of a waiting group -> uuids of the shards that repeat it."""
        self._num_damaged: dict[str, int] = {}
        self._next_seq = dict.fromkeys(producers, 0)
        self._has_looked = False
        self.on_record: dict[str, dict[int, int]] = {}
        """uuid of a shard -> guid -> rows that the plan accounts for, used or passed over."""
        for uuid, guid, rows in chain.base.on_record:
            self._put_on_record(uuid, guid, rows)
        for shard in chain.ignored:
            self._put_on_record(shard.uuid, REPEATED, shard.rows)
        for drop in chain.dropped:
            self.dropped.add((drop.guid, drop.dropped))
            self._put_on_record(drop.dropped, drop.guid, drop.rows)
        for group in chain.skipped:
            self._mark_skipped(group)
        for record in chain.steps:
            self.mark_planned(record)

    def find_judged_below(self, span: int) -> int:
        """The highest multiple of `span` below which all groups are planned, skipped or waiting."""
        guid = self.planned.below
        while guid in self.planned or guid in self.waiting:
            guid += 1
        return guid // span * span

    @property
    def seen(self) -> tuple[int, ...]:
        """Returns the sequence number after each producer's newest judged shard; empty before the
        first poll and without a judge. May be 0 if all shards of a producer are retired."""
        known = self._has_looked and self._judge is not None
        return tuple(self._next_seq.values()) if known else ()

    def num_records(self, producer: str) -> int:
        return self._tails[producer].num_records

    def ready(self, guid: int) -> bool:
        group = self.waiting.get(guid)
        return group is not None and not self.lacks(group)

    def lacks(self, group: WaitingGroup) -> list[ColumnWriter]:
        found = self._sidecars.get(group.part.uuid, {})
        return [role for role in self._needs if role not in found]

    def owners_of_what_lacks(self, group: WaitingGroup) -> list[str]:
        """Returns the sidecar writers that have yet to widen the shard of a group."""
        owners = []
        for role in self.lacks(group):
            writers = [name for name, written in self._writers.items() if written == role]
            owners.append(writers[self._producers.index(group.part.producer) % len(writers)])
        return owners

    def record_of(self, guids: Sequence[int], *, step: int, portion: int, last: bool) -> PlanRecord:
        """Returns the record that plans some waiting groups, with the sidecars that count."""
        groups = [self.waiting[guid] for guid in guids]
        sampled = [g.policy_version_min for g in groups if g.policy_version_min >= 0]
        uuids = dict.fromkeys(group.part.uuid for group in groups)
        return PlanRecord(
            step=step,
            guids=list(guids),
            parts=[group.part for group in groups],
            num_trajectories=sum(group.part.hi - group.part.lo for group in groups),
            policy_version_min=min(sampled, default=-1),
            num_tokens=sum(group.num_tokens for group in groups),
            portion=portion,
            last=last,
            sidecars={u: dict(found) for u in uuids if (found := self._sidecars.get(u))},
        )

    def mark_planned(self, record: PlanRecord) -> None:
        self.planned.update(record.guids)
        for guid, part in zip(record.guids, record.parts, strict=True):
            self._put_on_record(part.uuid, guid, part.hi - part.lo)
            self.waiting.pop(guid, None)
            self._repeats.pop(guid, None)

    def list_owed_again(self) -> list[tuple[int, str]]:
        """Returns (guid, uuid) of dropped groups that were not committed again."""
        return sorted(
            (guid, uuid)
            for guid, uuid in self.dropped
            if guid == WHOLE_SHARD or not (guid in self.planned or guid in self.waiting)
        )

    def drop(self, guid: int, *, step: int) -> list[DroppedGroup]:
        """Removes a waiting group because it is over age; its owner samples the prompt again.

        Repetitions of it are dropped as well: they are on record as ignored, and as old. Write the
        records in this order: a restart in between drops the rest.
        """
        part = self.waiting.pop(guid).part
        rows = dict.fromkeys(self._repeats.pop(guid, ()), 0) | {part.uuid: part.hi - part.lo}
        drops = [DroppedGroup(guid, uuid, n, "over_age", step) for uuid, n in rows.items()]
        for drop in drops:
            self.dropped.add((guid, drop.dropped))
            self._put_on_record(drop.dropped, guid, drop.rows)
        return drops

    def poll(self, step: int) -> None:
        """Reads new records while `step` is being planned.

        Raises:
            BusError: a committed record is damaged, or too many shards are.
        """
        for name, kind in self._names.items():
            for number, record in self._tails[name].poll_numbered():
                if record.kind is not kind:
                    continue
                self._live[name].append((number, record))
                if kind is RecordKind.BASE:
                    self._next_seq[name] = record.seq + 1
                if record.uuid in self._settled:
                    continue
                if kind is RecordKind.BASE:
                    self._admit(name, record, step)
                else:
                    self._widen(name, record)
        self._has_looked = True

    def retire(self, retired: GuidSet) -> dict[str, LogPosition]:
        """Forgets all that no resume needs any more; returns where in the logs the rest begins."""
        self.dropped = {d for d in self.dropped if d[0] >= retired.below or d[0] == WHOLE_SHARD}
        positions = {}
        for name, live in self._live.items():
            while live and live[0][1].guid_max < retired.below:
                record = live.popleft()[1]
                self.on_record.pop(record.uuid, None)
                self._settled.discard(record.uuid)
                self._sidecars.pop(record.uuid, None)
                self.dropped.discard((WHOLE_SHARD, record.uuid))
            settled = [r.uuid for _, r in live if r.guid_max < retired.below]
            first = (live[0][0], live[0][1].fence) if live else None
            tail = self._tails[name]
            positions[name] = LogPosition(*(first or (tail.num_records, tail.fence)), settled)
        return positions

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()

    def _admit(self, producer: str, record: CommitRecord, step: int) -> None:
        if (WHOLE_SHARD, record.uuid) in self.dropped:
            return
        if record.guid_max < self.planned.below:
            # All of its groups are planned, and its owner may have deleted it.
            repeated = self._num_unaccounted(record)
        else:
            try:
                repeated = self._open(producer, record, step)
            except DamagedError as error:
                self._drop_shard(producer, record, step, error)
                return
        if repeated and REPEATED not in self.on_record.get(record.uuid, {}):
            self._put_on_record(record.uuid, REPEATED, repeated)
            self.notes.append(IgnoredShard(record.uuid, repeated))

    def _drop_shard(
        self, producer: str, record: CommitRecord, step: int, error: DamagedError
    ) -> None:
        self._num_damaged[producer] = self._num_damaged.get(producer, 0) + 1
        if self._num_damaged[producer] > MAX_DAMAGED:
            raise BusError(
                f"{MAX_DAMAGED} committed shards of {producer} are damaged, the last one: {error}"
            ) from error
        log.error("%s; its prompt groups are sampled again", error)
        self.dropped.add((WHOLE_SHARD, record.uuid))
        rows = self._num_unaccounted(record)
        self._put_on_record(record.uuid, WHOLE_SHARD, rows)
        self.notes.append(DroppedGroup(WHOLE_SHARD, record.uuid, rows, "damaged", step))

    def _open(self, producer: str, record: CommitRecord, step: int) -> int:
        """Offers the groups of a shard; returns how many rows repeat earlier ones."""
        shard = self._shards.get(producer, record.fence, record.seq, record.uuid)
        _check_identity(shard, record)
        guids = shard.read("row/guid").astype(np.int64)
        versions = shard.read("row/policy_version_min").astype(np.int64)
        tokens = shard.read("row/prompt_len").astype(np.int64)
        tokens += shard.read("row/response_len").astype(np.int64)
        starts = np.flatnonzero(np.diff(guids, prepend=guids[0] - 1)).tolist()
        verdicts = self._verdicts(shard, len(starts))
        repeated = 0
        for lo, hi, verdict in zip(starts, [*starts[1:], len(guids)], verdicts, strict=True):
            guid = int(guids[lo])
            if guid in self.on_record.get(record.uuid, {}):
                continue
            if guid in self.planned or guid in self.waiting:
                repeated += hi - lo
                if guid in self.waiting:
                    self._repeats.setdefault(guid, []).append(record.uuid)
                continue
            if verdict is not None and not verdict.teaches:
                prompt = int(shard.read_rows("row/prompt_index", lo, lo + 1)[0])
                told = verdict._asdict()
                del told["teaches"]
                skipped = SkippedGroup(guid, record.uuid, hi - lo, step, prompt, **told)
                self.notes.append(skipped)
                self._mark_skipped(skipped)
                continue
            part = ShardRange(producer, record.fence, record.seq, record.uuid, lo, hi)
            sampled = [int(v) for v in versions[lo:hi] if v >= 0]
            oldest = min(sampled, default=-1)
            self.waiting[guid] = WaitingGroup(part, oldest, int(tokens[lo:hi].sum()))
        return repeated

    def _verdicts(self, shard: Shard, num_groups: int) -> Sequence[GroupVerdict | None]:
        if self._judge is None:
            return [None] * num_groups
        columns = {name: shard.read(f"row/{name}") for name in BatchIndex._fields}
        return self._judge(BatchIndex(**columns))

    def _mark_skipped(self, group: SkippedGroup) -> None:
        self.planned.update([group.guid])
        self._put_on_record(group.skipped, group.guid, group.rows)

    def _put_on_record(self, uuid: str, guid: int, rows: int) -> None:
        self.on_record.setdefault(uuid, {})[guid] = rows

    def _num_unaccounted(self, record: CommitRecord) -> int:
        return record.rows - sum(self.on_record.get(record.uuid, {}).values())

    def _widen(self, writer: str, record: CommitRecord) -> None:
        if record.guid_max < self.planned.below:
            return
        found = self._sidecars.setdefault(record.parent, {})
        if record.role in found:
            return
        try:
            shard = self._shards.get(writer, record.fence, record.seq, record.uuid)
            _check_identity(shard, record)
        except DamagedError as error:
            log.error("%s; restart %s to have it made again", error, writer)
            return
        found[record.role] = Sidecar(writer, record.fence, record.seq, record.uuid)


def _check_identity(shard: Shard, record: CommitRecord) -> None:
    attributes = shard.attributes
    parent = attributes.get("parent") or "0" * 32
    found = (shard.uuid, shard.length, shard.rows, parent, attributes.get("role"))
    if found != (record.uuid, record.length, record.rows, record.parent, record.role):
        raise DamagedError(
            f"{shard.path}: is not the shard that record {record.uuid} committed; restore the file"
        )
