"""Publishes prompt groups: each producer alone writes its log and its shards."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from relax_hpc.bus.credits import Owed
from relax_hpc.bus.log import CommitRecord, RecordKind
from relax_hpc.bus.owner import Owner
from relax_hpc.bus.shards.encode import from_columns, gather, part_names
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.bus.shards.shard_format import NAMES_OF_PARTS
from relax_hpc.errors import BusError, DamagedError
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import PRODUCER, ColumnPieces, PromptGroup

log = logging.getLogger(__name__)


class Producer(Owner):
    """Publishes prompt groups. Opening it claims the next fence and deletes its own orphans.

    Args:
        provenance: root attributes of every shard: run, job, node, restart count, engine build.
        spares: number of obsolete shards to keep for overwriting. File systems that have to
            allocate or free blocks may write at a fraction of their speed.

    Raises:
        BusError: not a bus of this format, no such producer, or a damaged log.
    """

    def __init__(
        self,
        paths: BusPaths,
        name: str,
        provenance: Mapping[str, str | int],
        *,
        compress: Iterable[str] = (),
        spares: int = 0,
    ) -> None:
        super().__init__(paths, name, PRODUCER, provenance, compress=compress, spares=spares)
        self._source: dict[int, CommitRecord] = {}
        """guid -> record of the live shard with the committed group."""
        self._partial_in: dict[str, set[int]] = {}
        """uuid of a live shard of unfinished groups -> guids still unfinished."""
        self.partial: dict[int, PromptGroup] = {}
        """Unfinished groups of an earlier incarnation, by guid."""
        self.partial_origin: dict[int, Mapping[str, object]] = {}
        """guid -> attributes of the shard that its unfinished group was read from."""
        self.num_damaged_tokens = 0
        """Tokens of unfinished groups in damaged shards, prompts included."""
        for record in list(self._live):
            try:
                self._recall(record)
            except DamagedError as error:
                log.error("%s; its prompt groups are sampled again", error)
                self.num_damaged_tokens += record.tokens * (record.kind is RecordKind.PARTIAL)
                self._forget_shard(record)

    @property
    def committed(self) -> set[int]:
        """Returns the guids in live shards; they need not be generated again."""
        return set(self._source)

    def put(self, groups: Sequence[PromptGroup]) -> int:
        """Publishes whole prompt groups as one shard; on return they are committed.

        Returns:
            Sequence number of the shard.

        Raises:
            BusError: a group is malformed or committed already.
            BusFullError: no space; nothing was committed, retry after `collect`.
            FencedError: a newer incarnation of this producer took over.
        """
        guids = [group.guid for group in groups]
        known = [g for g in guids if g in self._source or guids.count(g) > 1]
        if known:
            raise BusError(
                f"{self.name}: prompt groups {known} are committed already, or twice here"
            )
        record = self._commit(RecordKind.BASE, groups)
        self._finish(guids, record)
        return record.seq

    def seq_of(self, guid: int) -> int | None:
        """Returns the sequence number of the live shard with a committed group; None if
        uncommitted."""
        record = self._source.get(guid)
        return None if record is None else record.seq

    def put_partial(self, groups: Sequence[PromptGroup]) -> int:
        """Publishes unfinished prompt groups, for the next incarnation to continue.

        Siblings not begun have no response; a begun one ends with `FinishReason.ABORT`. They are
        never trained on.

        Returns:
            Sequence number of the shard.

        Raises:
            BusError, BusFullError, FencedError: as `put`.
        """
        record = self._commit(RecordKind.PARTIAL, groups)
        self._partial_in[record.uuid] = {group.guid for group in groups}
        self.partial.update({group.guid: group for group in groups})
        return record.seq

    def times_kept(self, guid: int) -> int:
        return sum(guid in guids for guids in self._partial_in.values())

    def owe_again(self, again: Iterable[Owed]) -> list[int]:
        """Takes back groups that the trainer will not use: their guids are uncommitted again.

        Idempotent.

        Returns:
            The guids to sample again.
        """
        dropped = set(again)
        owed = [
            guid
            for guid, record in self._source.items()
            if Owed(guid, record.uuid) in dropped or Owed(-1, record.uuid) in dropped
        ]
        for guid in owed:
            del self._source[guid]
        return sorted(owed)

    def collect(self, retired_guid_below: int) -> int:
        """Deletes own shards that nobody can need any more.

        Returns:
            Number of shards deleted.
        """
        done = {uuid for uuid, guids in self._partial_in.items() if not guids}
        for uuid in done:
            del self._partial_in[uuid]
        deleted = self._delete(lambda r: r.guid_max < retired_guid_below or r.uuid in done)
        for guid in [guid for guid in self._source if guid < retired_guid_below]:
            if self._source[guid].uuid in deleted:
                del self._source[guid]
        return len(deleted)

    def _commit(self, kind: RecordKind, groups: Sequence[PromptGroup]) -> CommitRecord:
        columns = gather(groups)
        names = part_names(t for group in groups for t in group.trajectories)
        guids = [group.guid for group in groups]
        oldest, newest = _version_range(columns)
        return self._publish(
            CommitRecord(
                kind,
                self.fence,
                self._seq,
                self.role,
                policy_version_min=oldest,
                policy_version_max=newest,
                guid_min=min(guids),
                guid_max=max(guids),
            ),
            columns,
            {NAMES_OF_PARTS: json.dumps(names)} if names else {},
        )

    def _recall(self, record: CommitRecord) -> None:
        """Notes which groups a live shard of an earlier incarnation holds; later shards win."""
        with Shard(self.shard(record)) as shard:
            if shard.uuid != record.uuid:
                raise DamagedError(f"{shard.path}: is not the shard that was committed")
            if record.kind is RecordKind.BASE:
                self._finish(np.unique(shard.read("row/guid")).tolist(), record)
                return
            groups: dict[int, PromptGroup] = {}
            for row in from_columns(shard.read_span(0, shard.rows), shard.part_names):
                groups.setdefault(row.guid, PromptGroup(row.guid, [])).trajectories.append(row)
            self.partial_origin.update({key: dict(shard.attributes) for key in groups})
        self._partial_in[record.uuid] = set(groups)
        self.partial.update(groups)

    def _finish(self, guids: Sequence[int], record: CommitRecord) -> None:
        """Notes that groups are committed as a whole, and drops their earlier unfinished parts.

        Later unfinished parts stay: they are of a group that the trainer dropped, sampled again.
        """
        self._source.update(dict.fromkeys(guids, record))
        for guid in guids:
            self.partial.pop(guid, None)
        for unfinished in self._partial_in.values():
            unfinished.difference_update(guids)


def _version_range(columns: ColumnPieces) -> tuple[int, int]:
    """Returns the oldest and newest policy that sampled anything; -1 if none did."""
    oldest, newest = (
        np.asarray(columns[f"row/policy_version_{end}"], np.int64).tolist()
        for end in ("min", "max")
    )
    return min((version for version in oldest if version >= 0), default=-1), max(newest)
