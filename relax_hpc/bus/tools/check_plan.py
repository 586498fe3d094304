"""Do the commit logs and the plan say the same? No shard is opened."""

from collections.abc import Iterator, Sequence

from relax_hpc.bus.log import RecordKind
from relax_hpc.bus.plan import Chain, PlanPosition, PlanRecord
from relax_hpc.bus.tools.findings import Commits, Finding
from relax_hpc.bus.tools.inventory import Writer
from relax_hpc.errors import BusError
from relax_hpc.schema import PRODUCER


def check_logs(writers: Sequence[Writer]) -> Iterator[Finding]:
    """Checks that each log holds what its writer may write, in order, and no shard twice."""
    seen: set[str] = set()
    for writer in writers:
        newest = -1
        for record in writer.shards:
            where = f"{writer.name}, fence {record.fence}, shard {record.seq}"
            if (record.kind is RecordKind.SIDE) != (writer.role != PRODUCER):
                yield Finding("log", where, f"{writer.role} committed a {record.kind.name} record")
            if record.role != writer.role:
                yield Finding("log", where, f"is of {record.role}, its log of {writer.role}")
            if record.seq <= newest:
                yield Finding("log", where, f"comes after shard {newest}; numbers must rise")
            if record.uuid in seen:
                yield Finding("log", where, f"uuid {record.uuid} is committed twice")
            newest = max(newest, record.seq)
            seen.add(record.uuid)


def check_sidecars(commits: Commits) -> Iterator[Finding]:
    """Checks that each sidecar widens a shard that there is, row by row."""
    for commit in commits.values():
        record = commit.record
        if record.kind is not RecordKind.SIDE:
            continue
        where = f"{commit.writer}, fence {record.fence}, shard {record.seq}"
        parent = commits.get(record.parent)
        if parent is None or parent.record.kind is not RecordKind.BASE:
            yield Finding("log", where, f"its parent {record.parent} is not committed")
        elif (record.rows, record.tokens) != (parent.record.rows, parent.record.tokens):
            yield Finding(
                "log",
                where,
                f"has {record.rows} rows of {record.tokens} tokens, its parent "
                f"{parent.record.rows} of {parent.record.tokens}",
            )


def check_plan(chain: Chain, commits: Commits) -> Iterator[Finding]:
    """Checks that every planned row is committed, and none planned twice."""
    yield from _order(chain.steps)
    planned: dict[int, int] = {}
    for record in chain.steps:
        where = _name(record)
        rows = sum(part.hi - part.lo for part in record.parts)
        if rows != record.num_trajectories or len(record.guids) != len(record.parts):
            yield Finding(
                "plan",
                where,
                f"says {record.num_trajectories} trajectories of {len(record.guids)} prompt "
                f"groups, its {len(record.parts)} parts hold {rows}",
            )
        for guid in record.guids:
            if guid in planned:
                yield Finding("plan", where, f"prompt group {guid} is in step {planned[guid]} too")
            planned[guid] = record.step
        yield from _parts(record, commits, where)
        yield from _sidecars(record, commits, where)
    for group in chain.skipped:
        if group.guid in planned:
            where = f"step {planned[group.guid]}"
            yield Finding("plan", where, f"prompt group {group.guid} is skipped, too")
    aside = [r.uuid for r in chain.ignored] + [r.dropped for r in chain.dropped]
    for uuid in aside + [group.skipped for group in chain.skipped]:
        if uuid not in commits:
            yield Finding("plan", "plan", f"sets aside shard {uuid}, which is not committed")


def check_checkpoints(chain: Chain, positions: Sequence[PlanPosition]) -> Iterator[Finding]:
    """Checks that each checkpoint can be resumed from, as far as the plan goes."""
    for position in positions:
        try:
            chain.check(position)
        except BusError as error:
            yield Finding("checkpoint", f"step {position.step}", str(error))


def _order(steps: Sequence[PlanRecord]) -> Iterator[Finding]:
    step, portion = 1, 0
    for record in steps:
        if (record.step, record.portion) != (step, portion):
            yield Finding(
                "plan",
                _name(record),
                f"stands where step {step}, portion {portion} is due",
            )
        step, portion = (record.step + 1, 0) if record.last else (record.step, record.portion + 1)


def _parts(record: PlanRecord, commits: Commits, where: str) -> Iterator[Finding]:
    for guid, part in zip(record.guids, record.parts, strict=False):
        commit = commits.get(part.uuid)
        if commit is None:
            yield Finding("plan", where, f"prompt group {guid}: {part.uuid} is not committed")
            continue
        shard = commit.record
        if (commit.writer, shard.fence, shard.seq) != part[:3]:
            yield Finding(
                "plan",
                where,
                f"prompt group {guid}: {part.uuid} is shard {shard.seq} of {commit.writer}, "
                f"not shard {part.seq} of {part.producer}",
            )
        in_shard = 0 <= part.lo < part.hi <= shard.rows
        if not in_shard or not shard.guid_min <= guid <= shard.guid_max:
            yield Finding(
                "plan",
                where,
                f"prompt group {guid}: rows {part.lo}..{part.hi - 1} of a shard of {shard.rows} "
                f"rows, guids {shard.guid_min}..{shard.guid_max}",
            )


def _sidecars(record: PlanRecord, commits: Commits, where: str) -> Iterator[Finding]:
    for parent, roles in record.sidecars.items():
        for role, sidecar in roles.items():
            commit = commits.get(sidecar.uuid)
            if commit is None:
                yield Finding("plan", where, f"sidecar {sidecar.uuid} ({role}) is not committed")
            elif (commit.record.parent, commit.record.role) != (parent, role):
                yield Finding(
                    "plan",
                    where,
                    f"sidecar {sidecar.uuid} is {commit.record.role} of {commit.record.parent}, "
                    f"planned as {role} of {parent}",
                )


def _name(record: PlanRecord) -> str:
    return f"step {record.step}" + (f", portion {record.portion}" if record.portion else "")
