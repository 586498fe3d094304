"""Was every trajectory used once? Counted from the logs alone; shards may be gone."""

from collections import Counter
from typing import NamedTuple

from relax_hpc.bus import layout
from relax_hpc.bus.log import CommitRecord, RecordKind, read_log
from relax_hpc.bus.plan import Chain, read_chain
from relax_hpc.bus.snapshot import GuidSet
from relax_hpc.bus.staleness import staleness
from relax_hpc.paths import BusPaths


class BusAudit(NamedTuple):
    """Trajectories, unless it says otherwise."""

    committed: int
    planned: int
    """Trained on, or about to be."""
    planned_twice: int
    """Rows in more than one step of the valid plan, or more than once in one; must be 0."""
    duplicates: int
    """Committed again by a producer that lost its acknowledgement, and ignored."""
    dropped: int
    """Passed over by the plan, and not on record as duplicates or as sampled again; must be 0."""
    steps: int
    """Steps planned."""
    max_staleness: int
    """Largest staleness of a planned trajectory's oldest token; 0 if nothing was planned."""
    over_age: int = 0
    """Dropped because they came too late; the prompts were sampled again."""
    damaged: int = 0
    """Rows in shards that could not be read; the prompts were sampled again."""
    skipped: int = 0
    """Passed over because they teach nothing; other prompts took their place."""
    retired: int = 0
    """Part of `skipped` that was never sampled: the prompt had been solved often enough."""


def audit(paths: BusPaths) -> BusAudit:
    """Counts, while the run goes on or afterwards.

    Raises:
        BusError: not a bus of this format, or a damaged log.
    """
    names = layout.open_bus(paths).producers
    chain = read_chain(paths)  # before the logs, so that what is planned is also committed
    commits = [
        record
        for name in names
        for record in read_log(paths.log(name))
        if record.kind is RecordKind.BASE
    ]
    parts = [part for step in chain.steps for part in step.parts]
    ages = [
        staleness(step.step, step.policy_version_min)
        for step in chain.steps
        if step.policy_version_min >= 0
    ]
    groups = zip((g for step in chain.steps for g in step.guids), parts, strict=True)
    planned: set[int] = set()
    repeated = 0
    for guid, part in groups:
        repeated += part.hi - part.lo if guid in planned else 0
        planned.add(guid)
    return BusAudit(
        committed=sum(record.rows for record in commits),
        planned=sum(step.num_trajectories for step in chain.steps),
        planned_twice=repeated,
        duplicates=_duplicates(commits, chain),
        dropped=_dropped(commits, chain),
        steps=sum(record.last for record in chain.steps),
        max_staleness=max(ages, default=0),
        over_age=sum(drop.rows for drop in chain.dropped if drop.why == "over_age"),
        damaged=sum(drop.rows for drop in chain.dropped if drop.why == "damaged"),
        skipped=sum(group.rows for group in chain.skipped),
        retired=sum(group.rows for group in chain.skipped if group.retired),
    )


def used_rows(chain: Chain) -> Counter[str]:
    """uuid of a shard -> rows that were planned, skipped, or dropped and sampled again."""
    used: Counter[str] = Counter()
    for step in chain.steps:
        for part in step.parts:
            used[part.uuid] += part.hi - part.lo
    for drop in chain.dropped:
        used[drop.dropped] += drop.rows
    for group in chain.skipped:
        used[group.skipped] += group.rows
    return used


def _duplicates(commits: list[CommitRecord], chain: Chain) -> int:
    """Rows that were ignored for good: those of a group whose first commit is damaged count."""
    used, rows = used_rows(chain), {commit.uuid: commit.rows for commit in commits}
    return sum(min(s.rows, rows.get(s.uuid, s.rows) - used[s.uuid]) for s in chain.ignored)


def _dropped(commits: list[CommitRecord], chain: Chain) -> int:
    """Rows of shards below the first guid without a decision that are not accounted for."""
    used = used_rows(chain)
    for shard in chain.ignored:
        used[shard.uuid] += shard.rows
    planned = GuidSet()
    planned.update(guid for step in chain.steps for guid in step.guids)
    planned.update(group.guid for group in chain.skipped)
    return sum(max(c.rows - used[c.uuid], 0) for c in commits if c.guid_max < planned.below)
