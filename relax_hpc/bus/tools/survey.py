"""The prompt groups on disk with their rewards, each shard opened once, and what is gone."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from relax_hpc.bus.log import CommitRecord, RecordKind
from relax_hpc.bus.plan import PlanRecord, read_chain
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.bus.tools import inventory, selection
from relax_hpc.bus.tools.inventory import Writer
from relax_hpc.bus.tools.selection import Sidecars
from relax_hpc.errors import DamagedError
from relax_hpc.paths import BusPaths


class Base(NamedTuple):
    """A shard of trajectories that was committed."""

    writer: Writer
    record: CommitRecord

    @property
    def place(self) -> tuple[str, int, int, str]:
        return (self.writer.name, self.record.fence, self.record.seq, self.record.uuid)


class Surveyed(NamedTuple):
    record: PlanRecord
    """A plan record of this prompt group alone."""
    rewards: tuple[float, ...]
    """One of each episode, by sibling, but of those that are masked."""
    prompt_index: int
    """Prompt of the file: the same one is sampled again in a later epoch."""

    @property
    def guid(self) -> int:
        return self.record.guids[0]

    @property
    def mean_reward(self) -> float | None:
        """None where all have failed and are masked."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


class Survey(NamedTuple):
    groups: list[Surveyed]
    """Each guid once, rising: as it was planned, or else as it was committed first."""
    deleted_shards: int
    """Shards of trajectories that were committed and are not on disk any more."""
    deleted_trajectories: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing was committed, of what was asked for."""
        return not self.groups and not self.deleted_shards


def take(
    paths: BusPaths,
    *,
    step: int | None = None,
    guid: int | None = None,
    newest: int | None = None,
    masks_errors: bool = False,
) -> Survey:
    """Surveys a bus; a shard that is deleted meanwhile counts as deleted.

    Args:
        paths: of the bus.
        step: only prompt groups that this step trains on.
        guid: only this prompt group.
        newest: only this many, those of the highest ordinals; other shards are not opened.
        masks_errors: an episode whose reward failed has none.

    Raises:
        BusError: not a bus of this format, damage, or a step that is not planned.
    """
    writers = inventory.take_all(paths)
    bases = _bases(writers)
    if guid is not None:
        bases = [base for base in bases if base.record.guid_min <= guid <= base.record.guid_max]
    if step is not None:
        planned = selection.of_steps(paths, step, step)
        uuids = {part.uuid for record in planned for part in record.parts}
        bases = [base for base in bases if base.record.uuid in uuids]
    there = [base for base in bases if _is_there(paths, base)]
    gone = len(bases) - len(there)
    gone_rows = sum(base.record.rows for base in bases) - sum(base.record.rows for base in there)
    groups: list[Surveyed] = []
    plan, sidecars = selection.by_place(read_chain(paths)), selection.sidecars_of(writers)
    for base in there if newest is None else _newest(there, newest):
        try:
            groups += _groups(paths, base, plan, sidecars, masks_errors=masks_errors)
        except DamagedError:
            if paths.shard(*base.place[:3]).exists():
                raise
            gone, gone_rows = gone + 1, gone_rows + base.record.rows
    asked = [g for g in groups if guid in (None, g.guid) and step in (None, g.record.step)]
    return Survey(_each_once(asked)[-(newest or 0) :], gone, gone_rows)


def _bases(writers: Iterable[Writer]) -> list[Base]:
    return [
        Base(writer, record)
        for writer in writers
        for record in writer.shards
        if record.kind is RecordKind.BASE
    ]


def _is_there(paths: BusPaths, base: Base) -> bool:
    """Files are listed before the log is read: what came in between is looked up."""
    path = paths.shard(*base.place[:3])
    return path in base.writer.files or path.exists()


def _newest(bases: Sequence[Base], count: int) -> list[Base]:
    """The shards that hold the `count` highest guids: each adds one, its highest, at least.

    Shards with the same highest guid are a commit and its repetition, and count as one.
    """
    highest = sorted({base.record.guid_max for base in bases}, reverse=True)[:count]
    return [base for base in bases if base.record.guid_max in highest]


def _groups(
    paths: BusPaths,
    base: Base,
    plan: Mapping[tuple[str, int], selection.Place],
    sidecars: Sidecars,
    *,
    masks_errors: bool,
) -> Iterator[Surveyed]:
    with Shard(paths.shard(*base.place[:3])) as shard:
        parts = selection.parts_in(shard, base.place)
        counts = shard.read("row/segment") == 0
        if masks_errors:
            counts &= shard.read("row/reward_error") == 0
        rewards = shard.read("row/rewards")
        prompts = shard.read("row/prompt_index")
    for guid, part in parts:
        place = plan.get((part.uuid, part.lo))
        record = selection.group_of(*place) if place else selection.unplanned(guid, part, sidecars)
        rows = slice(part.lo, part.hi)
        yield Surveyed(record, tuple(rewards[rows][counts[rows]].tolist()), int(prompts[part.lo]))


def _each_once(groups: Iterable[Surveyed]) -> list[Surveyed]:
    """By guid, rising; of one that was committed twice, the planned one, or else the first."""
    found: dict[int, Surveyed] = {}
    for group in groups:
        if group.guid not in found or (group.record.step and not found[group.guid].record.step):
            found[group.guid] = group
    return [found[guid] for guid in sorted(found)]
