"""The sequencer's view of what producers committed: which shard holds which prompt group."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from relax_hpc.bus.log import CommitRecord, LogTail, RecordKind
from relax_hpc.bus.plan import IgnoredShard, Part, PlanRecord
from relax_hpc.bus.shard import Shard
from relax_hpc.errors import BusError
from relax_hpc.paths import BusPaths


class Group(NamedTuple):
    """A committed prompt group that waits for its step."""

    part: Part
    policy_version_min: int


class Intake:
    """Follows the producers' logs and admits each shard once. The first commit of a guid wins.

    Args:
        planned: steps that an earlier incarnation planned; their groups are not offered again.
        ignored: repetitions that are on record already.
    """

    def __init__(
        self,
        paths: BusPaths,
        producers: Sequence[str],
        planned: Iterable[PlanRecord],
        ignored: Iterable[IgnoredShard],
    ) -> None:
        self.waiting: dict[int, Group] = {}
        self.ignored: list[IgnoredShard] = []
        """Repetitions seen since the list was last emptied."""
        self._paths = paths
        self._tails = {name: LogTail(paths.log(name)) for name in producers}
        self._source: dict[int, str] = {}
        """guid -> uuid of the shard it is planned from."""
        self._planned_shards: set[str] = set()
        for record in planned:
            self.mark_planned(record)
        self._noted = {shard.uuid for shard in ignored}

    def num_records(self, producer: str) -> int:
        return self._tails[producer].num_records

    def mark_planned(self, record: PlanRecord) -> None:
        for guid, part in zip(record.guids, record.parts, strict=True):
            self._source[guid] = part.uuid
            self._planned_shards.add(part.uuid)
            self.waiting.pop(guid, None)

    def poll(self) -> None:
        """Raises:
        BusError: a committed record or shard is damaged.
        """
        for producer, tail in self._tails.items():
            for record in tail.poll():
                if record.kind is RecordKind.BASE:
                    self._admit(producer, record)

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()

    def _admit(self, producer: str, record: CommitRecord) -> None:
        if record.guid_max in self._source:
            # Plans go by guid, so all of it is planned, and its owner may have deleted it.
            repeated = 0 if record.uuid in self._planned_shards else record.rows
        else:
            repeated = self._open(producer, record)
        if repeated and record.uuid not in self._noted:
            self._noted.add(record.uuid)
            self.ignored.append(IgnoredShard(record.uuid, repeated))

    def _open(self, producer: str, record: CommitRecord) -> int:
        """Offers the groups of a shard; returns how many rows repeat earlier ones."""
        path = self._paths.shard(producer, record.epoch, record.seq)
        with Shard(path) as shard:
            if (shard.uuid, shard.length, shard.rows) != (record.uuid, record.length, record.rows):
                raise BusError(
                    f"{path}: is not the shard that record {record.uuid} of "
                    f"{self._paths.log(producer)} committed; restore the file"
                )
            guids = shard.read("row/guid").astype(np.int64)
            versions = shard.read("row/policy_version_min").astype(np.int64)
        starts = np.flatnonzero(np.diff(guids, prepend=guids[0] - 1)).tolist()
        repeated = 0
        for lo, hi in zip(starts, [*starts[1:], len(guids)], strict=True):
            guid, part = (
                int(guids[lo]),
                Part(producer, record.epoch, record.seq, record.uuid, lo, hi),
            )
            if self._source.get(guid) == record.uuid:
                continue
            if guid in self._source or guid in self.waiting:
                repeated += hi - lo
                continue
            sampled = [int(v) for v in versions[lo:hi] if v >= 0]
            self.waiting[guid] = Group(part, min(sampled, default=-1))
        return repeated
