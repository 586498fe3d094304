"""Adds columns to other writers' shards, row for row, in shards of one's own."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.bus import layout
from relax_hpc.bus.log import CommitRecord, LogTail, RecordKind
from relax_hpc.bus.owner import Owner
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.bus.shards.shard_format import ROW_OFFSETS
from relax_hpc.errors import BusError, DamagedError, FencedError
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import COLUMNS, Columns, columns_of


class Pending(NamedTuple):
    producer: str
    record: CommitRecord


class SidecarWriter(Owner):
    """Widens its part of the shards: the producers i with i % W == w, for w of the role's W.

    It may do a shard again after a crash: the first committed sidecar counts.

    Args:
        paths: a bus made by `layout.create`, with `name` among its sidecar writers.
        name: says the role, and which of its writers this is.

    Raises:
        BusError: not a bus of this format, no such writer, or a damaged log.
    """

    def __init__(
        self,
        paths: BusPaths,
        name: str,
        provenance: Mapping[str, str | int],
        *,
        compress: Iterable[str] = (),
    ) -> None:
        header = layout.open_bus(paths)
        if name not in header.sidecar_writers:
            raise BusError(
                f"{paths.header}: has no sidecar writer {name}; it has {header.sidecar_writers}"
            )
        super().__init__(paths, name, header.sidecar_writers[name], provenance, compress=compress)
        peers = [peer for peer, role in header.sidecar_writers.items() if role == self.role]
        mine = header.producers[peers.index(name) :: len(peers)]
        self._tails = {producer: LogTail(paths.log(producer)) for producer in mine}
        self._pending: dict[str, Pending] = {}
        self._offsets: dict[str, npt.NDArray[np.int64]] = {}
        """Row boundaries of shards that were opened and not widened yet."""
        self._done = {r.parent: r.guid_max for r in self._live if self._is_whole(r)}
        """Shards widened or skipped, until the trainer releases them: uuid -> last guid."""
        self._retired = 0
        """Shards whose guids are all below need no columns any more."""

    def pending(self, retired_guid_below: int = 0) -> list[Pending]:
        """Returns the shards that lack this role's columns, oldest first.

        Args:
            retired_guid_below: guid that the trainer released; shards below are left out.

        Raises:
            BusError: a committed record is damaged.
        """
        for producer, tail in self._tails.items():
            for record in tail.poll():
                if record.kind is RecordKind.BASE and record.uuid not in self._done:
                    self._pending[record.uuid] = Pending(producer, record)
        retired = max(self._retired, retired_guid_below)
        for uuid, (_, record) in list(self._pending.items()):
            if record.guid_max < retired:
                del self._pending[uuid]
        return sorted(self._pending.values(), key=lambda pending: pending.record.guid_min)

    def open(self, pending: Pending) -> Shard:
        """Opens the shard to widen, to read the inputs of the columns.

        Raises:
            DamagedError: it is missing or damaged; `skip` it, its owner makes the groups again.
        """
        record = pending.record
        shard = Shard(self._paths.shard(pending.producer, record.fence, record.seq))
        if shard.uuid != record.uuid:
            shard.close()
            raise DamagedError(f"{shard.path}: is not the shard that was committed; restore it")
        self._offsets[shard.uuid] = shard.read(ROW_OFFSETS).astype(np.int64)
        return shard

    def put(self, pending: Pending, columns: Columns, *, policy_version: int = -1) -> int:
        """Publishes the further columns of a shard; on return they are committed.

        Args:
            columns: every column of this role, with as many values as the shard has rows or tokens,
                in its order.
            policy_version: of the weights that computed them; -1 if meaningless.

        Returns:
            Sequence number of the sidecar.

        Raises:
            BusError: a column is missing, of another role, dtype or length.
            DamagedError: the shard to widen is missing or damaged.
            BusFullError: no space; nothing was committed, retry after `collect`.
            FencedError: a newer incarnation of this writer took over.
        """
        wanted = columns_of(self.role)
        if columns.keys() != wanted.keys():
            raise BusError(
                f"{self.name}: columns {sorted(columns)} given, {self.role} writes {sorted(wanted)}"
            )
        if pending.record.uuid not in self._offsets:
            self.open(pending).close()
        offsets = self._offsets[pending.record.uuid]
        for name, values in columns.items():
            expected = len(offsets) - 1 if COLUMNS[name].axis == "row" else int(offsets[-1])
            if len(values) != expected:
                raise BusError(
                    f"{self.name}: {name} has {len(values)} values, shard {pending.record.uuid} "
                    f"has {expected}"
                )
        record = self._publish(
            pending.record._replace(
                kind=RecordKind.SIDE,
                fence=self.fence,
                seq=self._seq,
                role=self.role,
                parent=pending.record.uuid,
                policy_version_min=policy_version,
                policy_version_max=policy_version,
            ),
            {ROW_OFFSETS: offsets, **columns},
        )
        self.skip(pending)
        return record.seq

    def skip(self, pending: Pending) -> None:
        self._done[pending.record.uuid] = pending.record.guid_max
        self._pending.pop(pending.record.uuid, None)
        self._offsets.pop(pending.record.uuid, None)

    def check_fenced(self) -> None:
        """Raises FencedError if another process took over; callable from any thread."""
        tail = LogTail(self._paths.log(self.name))
        try:
            tail.poll()
            if tail.fence > self.fence:
                raise FencedError(
                    f"{self.name}: fence {tail.fence} was claimed after {self.fence}; another "
                    "process took over, this one must end"
                )
        finally:
            tail.close()

    def collect(self, retired_guid_below: int) -> int:
        """Deletes own shards whose guids are all below one that the trainer released.

        Also forgets the shards that they widen.

        Returns:
            Number of shards deleted.
        """
        self._retired = max(self._retired, retired_guid_below)
        self._done = {u: last for u, last in self._done.items() if last >= self._retired}
        return len(self._delete(lambda record: record.guid_max < retired_guid_below))

    def close(self) -> None:
        super().close()
        for tail in self._tails.values():
            tail.close()

    def _is_whole(self, record: CommitRecord) -> bool:
        try:
            with Shard(self.shard(record)) as shard:
                return shard.uuid == record.uuid
        except DamagedError:
            return False
