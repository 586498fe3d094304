"""The prompt groups of a bus that a tool is asked about, each as a plan record of its own.

So that every tool reads rows the way the trainer does: through `Reader`, sidecars included.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from relax_hpc.bus.log import CommitRecord, RecordKind
from relax_hpc.bus.plan import Chain, Part, PlanRecord, Sidecar, read_chain
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.bus.tools import inventory
from relax_hpc.bus.tools.inventory import Writer
from relax_hpc.errors import BusError
from relax_hpc.paths import BusPaths
from relax_hpc.schema import Role

UNPLANNED = 0
"""Step of a prompt group that no step trains on, or not yet."""
MERGED_GROUPS = 16
Sidecars = dict[str, dict[Role, Sidecar]]
"""uuid of a base shard -> role -> its sidecar."""
Place = tuple[PlanRecord, int]
"""A batch, and the number of a prompt group in it."""


def of_steps(paths: BusPaths, first: int, last: int) -> list[PlanRecord]:
    """The plan records of some steps, in the order in which the trainer gets them.

    Raises:
        BusError: not a bus of this format, a damaged plan, a step that is not planned, or one
            whose shards are not on disk any more.
    """
    planned = read_chain(paths).steps
    newest = max((record.step for record in planned), default=0)
    if not 1 <= first <= last <= newest:
        held = f"steps 1 to {newest} are planned" if newest else "nothing is planned yet"
        asked = f"step {first}" if first == last else f"steps {first} to {last}"
        raise BusError(f"{paths.plan}: has no {asked}; {held}")
    return [record for record in planned if first <= record.step <= last]


def groups(record: PlanRecord) -> Iterator[PlanRecord]:
    """A plan record for each prompt group of a batch, in its order."""
    return (group_of(record, index) for index in range(len(record.guids)))


def group_of(record: PlanRecord, index: int) -> PlanRecord:
    """The plan record of one prompt group of a batch."""
    part = record.parts[index]
    return record._replace(
        guids=[record.guids[index]], parts=[part], num_trajectories=part.hi - part.lo
    )


def merged(records: Iterable[PlanRecord]) -> Iterator[PlanRecord]:
    """A few neighbouring prompt groups of a step as one record, so that they are one read."""
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
    """Every committed prompt group whose shard is there: producer by producer, as committed.

    Raises:
        BusError: not a bus of this format, a damaged log or plan, or a damaged shard.
    """
    writers = inventory.take_all(paths)
    planned, sidecars = by_place(read_chain(paths)), sidecars_of(writers)
    for writer in writers:
        for record in writer.shards:
            path = paths.shard(writer.name, record.fence, record.seq)
            if record.kind is RecordKind.BASE and path in writer.files:
                for guid, part in parts_of(paths, writer, record):
                    place = planned.get((part.uuid, part.lo))
                    yield group_of(*place) if place else unplanned(guid, part, sidecars)


def of_guid(paths: BusPaths, guid: int) -> PlanRecord:
    """The prompt group that is planned, or else the one committed first.

    Raises:
        BusError: not a bus of this format, damage, or no such group.
    """
    for record in read_chain(paths).steps:
        if guid in record.guids:
            return group_of(record, record.guids.index(guid))
    writers = inventory.take_all(paths)
    for writer in writers:
        for found, part in _parts_near(paths, writer, guid):
            if found == guid:
                return unplanned(guid, part, sidecars_of(writers))
    raise BusError(f"{paths.root}: prompt group {guid} is not committed; see relax-hpc bus ls")


def _parts_near(paths: BusPaths, writer: Writer, guid: int) -> Iterator[tuple[int, Part]]:
    for record in writer.shards:
        if record.kind is RecordKind.BASE and record.guid_min <= guid <= record.guid_max:
            yield from parts_of(paths, writer, record)


def sidecars_of(writers: Sequence[Writer]) -> Sidecars:
    """The sidecar of each base shard that counts, per role: the first that was committed."""
    found: Sidecars = {}
    for writer in writers:
        for record in writer.shards:
            if record.kind is RecordKind.SIDE:
                sidecar = Sidecar(writer.name, record.fence, record.seq, record.uuid)
                found.setdefault(record.parent, {}).setdefault(record.role, sidecar)
    return found


def parts_of(paths: BusPaths, writer: Writer, record: CommitRecord) -> list[tuple[int, Part]]:
    """The prompt groups of a shard: guid, and the rows that hold it."""
    with Shard(paths.shard(writer.name, record.fence, record.seq)) as shard:
        return parts_in(shard, (writer.name, record.fence, record.seq, record.uuid))


def parts_in(shard: Shard, place: tuple[str, int, int, str]) -> list[tuple[int, Part]]:
    """The prompt groups of an open shard.

    Args:
        place: producer, fence, seq and uuid.
    """
    guids = shard.read("row/guid").astype(np.int64)
    starts = np.flatnonzero(np.diff(guids, prepend=guids[0] - 1)).tolist()
    return [
        (int(guids[lo]), Part(*place, lo, hi))
        for lo, hi in zip(starts, [*starts[1:], len(guids)], strict=True)
    ]


def deleted(paths: BusPaths, records: Sequence[PlanRecord]) -> dict[int, list[str]]:
    """Step -> those of its shards that are not on disk any more."""
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
    BusError: names the first step that cannot be read back, and how shards are kept.
    """
    if gone := deleted(paths, records):
        step, files = min(gone.items())
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise BusError(
            f"step {step}: {files[0]}{more} of its shards are deleted, and so for {len(gone)} "
            "of the steps asked for; they go once a checkpoint covers them; bus.keep_steps keeps "
            "those of more steps"
        )


def by_place(chain: Chain) -> dict[tuple[str, int], Place]:
    """(shard, first row) -> the plan record of that prompt group, and where it is in it."""
    return {
        (part.uuid, part.lo): (record, index)
        for record in chain.steps
        for index, part in enumerate(record.parts)
    }


def unplanned(guid: int, part: Part, sidecars: Sidecars) -> PlanRecord:
    """A plan record for a prompt group that no step trains on, or not yet."""
    return PlanRecord(
        step=UNPLANNED,
        guids=[guid],
        parts=[part],
        num_trajectories=part.hi - part.lo,
        policy_version_min=-1,
        num_tokens=0,
        sidecars={part.uuid: sidecars.get(part.uuid, {})},
    )
