"""The writing end: one producer owns its log and its shards, and nobody else touches them."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from relax_hpc.bus import layout, shard_write
from relax_hpc.bus.durable import sync_folder
from relax_hpc.bus.encode import to_columns
from relax_hpc.bus.log import CommitRecord, LogWriter, RecordKind
from relax_hpc.bus.shard import Shard
from relax_hpc.errors import BusError
from relax_hpc.paths import BusPaths
from relax_hpc.schema import Columns, PromptGroup

_RESERVED = {
    "rl_shard_format", "shard_uuid", "n_samples", "producer", "epoch", "seq", "role",
    "policy_min", "policy_max", "parent",
}  # fmt: skip


class Producer:
    """Publishes prompt groups. Opening it claims the next epoch and deletes its own orphans.

    Args:
        paths: a bus that `layout.create` made.
        name: one of the producers it was made for.
        provenance: root attributes of every shard: run, job, node, restart count, engine build.

    Raises:
        BusError: not a bus of this format, no such producer, or a damaged log or shard.
    """

    def __init__(self, paths: BusPaths, name: str, provenance: Mapping[str, str | int]) -> None:
        if clash := _RESERVED & provenance.keys():
            raise BusError(f"provenance of {name}: {sorted(clash)} are the bus's own attributes")
        if name not in layout.open_bus(paths).producers:
            raise BusError(f"{paths.header}: has no producer {name}")
        self.name = name
        self._paths = paths
        self._provenance = dict(provenance)
        self._log = LogWriter(paths.log(name))
        self.epoch = max((r.epoch for r in self._log.records), default=0) + 1
        self._seq = max((r.seq for r in self._shard_records()), default=-1) + 1
        # The claim comes first: from here on whatever older epochs left unrecorded stays so.
        self._log.append(CommitRecord(RecordKind.OPEN, self.epoch, self._seq))
        paths.epoch(name, self.epoch).mkdir()
        sync_folder(paths.producer(name))
        self._live = self._clean()
        self.committed = self._committed()
        """Guids in live shards: what need not be generated again."""

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
            self._log.close()

    def put(self, groups: Sequence[PromptGroup]) -> int:
        """Publishes whole prompt groups as one shard: on return they are committed.

        Returns:
            Sequence number of the shard.

        Raises:
            BusError: a group is malformed or committed already.
            BusFullError: no space; nothing was committed, try again after `collect`.
        """
        guids = [group.guid for group in groups]
        known = [g for g in guids if g in self.committed or guids.count(g) > 1]
        if known:
            raise BusError(
                f"{self.name}: prompt groups {known} are committed already, or twice here"
            )
        columns = to_columns(groups)
        versions = _version_range(columns)
        seq = self._seq
        info = shard_write.write(
            self._paths.shard(self.name, self.epoch, seq),
            columns,
            self._provenance
            | {"producer": self.name, "epoch": self.epoch, "seq": seq, "role": "rollout"}
            | {"policy_min": versions[0], "policy_max": versions[1], "parent": ""},
        )
        record = CommitRecord(
            RecordKind.BASE, self.epoch, seq, "rollout", info.uuid, length=info.length,
            rows=info.rows, tokens=info.tokens, policy_version_min=versions[0],
            policy_version_max=versions[1], guid_min=min(guids), guid_max=max(guids),
        )  # fmt: skip
        self._log.append(record)
        self._live.append(record)
        self.committed.update(guids)
        self._seq += 1
        return seq

    def collect(self, retired_guid_below: int) -> int:
        """Deletes own shards whose guids are all below an ordinal that the trainer released.

        Returns:
            Shards deleted.
        """
        dead = [r for r in self._live if r.guid_max < retired_guid_below]
        for record in dead:
            self._paths.shard(self.name, record.epoch, record.seq).unlink(missing_ok=True)
        self._live = [r for r in self._live if r.guid_max >= retired_guid_below]
        if dead:
            self._log.restore_ballast()
        return len(dead)

    def close(self) -> None:
        """Records that this producer ended on purpose."""
        self._log.append(CommitRecord(RecordKind.CLOSE, self.epoch, self._seq))
        self._log.close()

    def _shard_records(self) -> list[CommitRecord]:
        return [r for r in self._log.records if r.kind in (RecordKind.BASE, RecordKind.SIDE)]

    def _clean(self) -> list[CommitRecord]:
        """Deletes what older epochs left without a record; returns the records whose file is left.

        Listing is fine here: the folders are this producer's own, and it does so once.
        """
        recorded = {self._paths.shard(self.name, r.epoch, r.seq): r for r in self._shard_records()}
        live = []
        for folder in sorted(self._paths.producer(self.name).glob("e*")):
            for file in sorted(folder.iterdir()):
                if file in recorded:
                    live.append(recorded[file])
                else:
                    file.unlink()
        return sorted(live, key=lambda record: record.seq)

    def _committed(self) -> set[int]:
        guids: set[int] = set()
        for record in self._live:
            with Shard(self._paths.shard(self.name, record.epoch, record.seq)) as shard:
                guids.update(np.unique(shard.read("row/guid")).tolist())
        return guids


def _version_range(columns: Columns) -> tuple[int, int]:
    """Oldest and newest policy that sampled anything; -1 if none did."""
    oldest = columns["row/policy_version_min"].astype(np.int64)
    return min(oldest[oldest >= 0].tolist(), default=-1), int(
        columns["row/policy_version_max"].max()
    )
