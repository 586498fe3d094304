"""`bus gc`: deletes from the bus of a run that has ended what nobody can need.

Owners do the same when they start again; this is for runs that will not soon.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from relax_hpc.bus.audit import used_rows
from relax_hpc.bus.log import CommitRecord, RecordKind
from relax_hpc.bus.plan import Chain, PlanPosition, read_chain
from relax_hpc.bus.tools import inventory
from relax_hpc.bus.tools.check_control import check_control
from relax_hpc.bus.tools.deletable import last_reading, oldest_step
from relax_hpc.bus.tools.inventory import File, Writer, latest_credit
from relax_hpc.bus.tools.strays import is_orphan
from relax_hpc.errors import BusError
from relax_hpc.paths import BusPaths
from relax_hpc.records import sync
from relax_hpc.telemetry import tables


class Garbage(NamedTuple):
    """Files to delete."""

    orphans: list[File]
    """No record names them."""
    retired: list[File]
    """The trainer gave leave, and no step behind a kept checkpoint reads them."""

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in [*self.orphans, *self.retired])


def find(paths: BusPaths, checkpoints: Sequence[PlanPosition]) -> Garbage:
    """Finds everything that may be deleted, provided that nobody works on this bus.

    Args:
        checkpoints: where those that are kept are in the plan.

    Raises:
        BusError: not a bus of this format, or a damaged log or plan: nothing is safe to delete.
    """
    writers = inventory.take_all(paths)
    for damage in check_control(paths, [writer.name for writer in writers], read_chain(paths)):
        raise BusError(f"{damage.where}: {damage.what}; nothing was deleted")
    needs = _Needs(paths, writers, checkpoints)
    orphans: list[File] = []
    retired: list[File] = []
    for writer in writers:
        orphans += filter(is_orphan, inventory.unrecorded(paths, writer))
        for record in writer.shards:
            file = writer.files.get(paths.shard(writer.name, record.fence, record.seq))
            if file is not None and not needs.needs(record):
                retired.append(file)
    return Garbage(orphans, retired)


def delete(garbage: Garbage) -> None:
    """Deletes what `find` has found."""
    files = [file.path for file in [*garbage.orphans, *garbage.retired]]
    for path in files:
        path.unlink(missing_ok=True)
    for folder in sorted({path.parent for path in files}):
        sync(folder)


def text(garbage: Garbage, *, dry_run: bool) -> str:
    """Each file, and what they come to."""
    lines = [f"orphan   {file.path}" for file in garbage.orphans]
    lines += [f"retired  {file.path}" for file in garbage.retired]
    verb = "would free" if dry_run else "freed"
    count = f"{len(garbage.orphans)} orphans, {len(garbage.retired)} retired shards"
    return "\n".join([*lines, f"{verb} {tables.size(garbage.nbytes)}: {count}"])


class _Needs:
    """Both the last grant and the checkpoints on disk must agree before a shard can go."""

    def __init__(
        self, paths: BusPaths, writers: Sequence[Writer], checkpoints: Sequence[PlanPosition]
    ) -> None:
        chain = read_chain(paths)
        self._retired = latest_credit(paths).retired_guid_below
        self._oldest = oldest_step(checkpoints)
        self._last_reading = last_reading(chain)
        self._settled = _settled_rows(chain)
        self._bases = {r.uuid: r for w in writers for r in w.shards if r.kind is RecordKind.BASE}

    def needs(self, record: CommitRecord) -> bool:
        if record.guid_max >= self._retired:
            return True
        base = self._bases.get(record.parent, record)  # a sidecar goes with what it widens
        if base.kind is not RecordKind.BASE:
            return False
        unsettled = self._settled[base.uuid] < base.rows
        return unsettled or self._last_reading.get(base.uuid, 0) > self._oldest


def _settled_rows(chain: Chain) -> Counter[str]:
    """uuid -> rows that are planned, or on record as never to be trained on."""
    rows = used_rows(chain)
    for ignored in chain.ignored:
        rows[ignored.uuid] += ignored.rows
    return rows
