"""`bus gc`: deletes all that nobody can need from the bus of a run that has ended.

Owners do the same when they restart; this is for runs that will not restart soon. A shard may go
once no step that can still be trained reads it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from relax_hpc.bus.audit import count_used_rows
from relax_hpc.bus.credits import Credit
from relax_hpc.bus.log import CommitRecord, RecordKind
from relax_hpc.bus.plan import Chain, PlanPosition, read_chain
from relax_hpc.bus.tools import inventory
from relax_hpc.bus.tools.inventory import FileEntry, Writer, is_orphan
from relax_hpc.bus.tools.verify import check_control, ever_retired, last_reading, oldest_step
from relax_hpc.errors import BusError
from relax_hpc.runtime.files.records import sync
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.runtime.text import format_size


def is_deletable(paths: BusPaths, step: int) -> bool:
    """Whether owners were ever allowed to delete shards of a step."""
    guids = [guid for each in read_chain(paths).steps if each.step == step for guid in each.guids]
    return min(guids, default=ever_retired(paths)) < ever_retired(paths)


class Garbage(NamedTuple):
    orphans: list[FileEntry]
    retired: list[FileEntry]
    """Released by the trainer, and read by no step after a kept checkpoint."""

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in [*self.orphans, *self.retired])


def find(paths: BusPaths, checkpoints: Sequence[PlanPosition]) -> Garbage:
    """Finds everything that may be deleted, provided that nobody works on this bus.

    Args:
        checkpoints: positions in the plan of the checkpoints kept.

    Raises:
        BusError: not a bus of this format, or a damaged log or plan: nothing is safe to delete.
    """
    writers, chain = inventory.read_writers(paths), read_chain(paths)
    for damage in check_control(paths, [writer.name for writer in writers], chain):
        raise BusError(f"{damage.where}: {damage.what}; nothing was deleted")
    needs = _Needs(paths, writers, chain, checkpoints)
    shards = [shard for writer in writers for shard in writer.shards]
    return Garbage(
        orphans=[f for writer in writers for f in writer.unrecorded if is_orphan(f)],
        retired=[s.file for s in shards if s.file is not None and not needs.needs(s.record)],
    )


def delete(garbage: Garbage) -> None:
    files = [file.path for file in [*garbage.orphans, *garbage.retired]]
    for path in files:
        path.unlink(missing_ok=True)
    for folder in sorted({path.parent for path in files}):
        sync(folder)


def text(garbage: Garbage, *, dry_run: bool) -> str:
    lines = [f"orphan   {file.path}" for file in garbage.orphans]
    lines += [f"retired  {file.path}" for file in garbage.retired]
    verb = "would free" if dry_run else "freed"
    count = f"{len(garbage.orphans)} orphans, {len(garbage.retired)} retired shards"
    return "\n".join([*lines, f"{verb} {format_size(garbage.nbytes)}: {count}"])


class _Needs:
    """Decides by both the last grant and the checkpoints on disk whether a shard may go."""

    def __init__(
        self,
        paths: BusPaths,
        writers: Sequence[Writer],
        chain: Chain,
        checkpoints: Sequence[PlanPosition],
    ) -> None:
        self._retired = (inventory.newest_credit(paths) or Credit()).retired_guid_below
        self._oldest = oldest_step(checkpoints)
        self._last_reading = last_reading(chain)
        self._settled = _count_settled_rows(chain)
        records = [shard.record for writer in writers for shard in writer.shards]
        self._bases = {r.uuid: r for r in records if r.kind is RecordKind.BASE}

    def needs(self, record: CommitRecord) -> bool:
        if record.guid_max >= self._retired:
            return True
        base = self._bases.get(record.parent, record)  # a sidecar goes with what it widens
        if base.kind is not RecordKind.BASE:
            return False
        unsettled = self._settled[base.uuid] < base.rows
        return unsettled or self._last_reading.get(base.uuid, 0) > self._oldest


def _count_settled_rows(chain: Chain) -> Counter[str]:
    """Returns uuid -> rows that are planned, or will never be trained on."""
    rows = count_used_rows(chain)
    for ignored in chain.ignored:
        rows[ignored.uuid] += ignored.rows
    return rows
