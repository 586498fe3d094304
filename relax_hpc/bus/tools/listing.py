"""`bus ls`: every writer and the plan in a line each, while the run goes on or afterwards."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from relax_hpc.bus.credits import Credit
from relax_hpc.bus.log import CommitRecord, RecordKind
from relax_hpc.bus.plan import Chain, PlanPosition, read_chain
from relax_hpc.bus.tools import inventory
from relax_hpc.bus.tools.check_control import check_credits
from relax_hpc.bus.tools.inventory import File, Writer
from relax_hpc.paths import BusPaths
from relax_hpc.schema import PRODUCER
from relax_hpc.telemetry import tables


@dataclass(frozen=True, slots=True)
class WriterRow:
    """A producer or sidecar writer; -1 where there is no version or no guid."""

    name: str
    role: str
    state: str
    """open, closed (it ended on purpose), or unused; open does not mean that it is alive."""
    fence: int
    live_shards: int
    """Shards of it on disk."""
    retired_shards: int
    """Deleted by their owner, with the trainer's leave."""
    missing_shards: int
    """Gone without that leave; must be 0."""
    trajectories: int
    """Committed since the run began, as `tokens`."""
    tokens: int
    bytes_on_disk: int
    policy_version_min: int
    policy_version_max: int
    guid_min: int
    guid_max: int
    trajectories_per_s: float | None
    """Over the files on disk, by their times of modification; None for fewer than two."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Files of all writers; trajectories and tokens of the producers, which sidecars repeat."""

    live_shards: int
    retired_shards: int
    missing_shards: int
    trajectories: int
    tokens: int
    bytes_on_disk: int
    trajectories_per_s: float | None


@dataclass(frozen=True, slots=True)
class PlanRow:
    """The plan, and what the trainer granted."""

    fences: list[tuple[int, int]]
    """(incarnation of the trainer, records it kept of those before), oldest first."""
    steps: int
    trajectories: int
    checkpoint: PlanPosition | None
    """Position of the newest checkpoint."""
    credit: Credit | None
    """None before the first trainer has started."""
    damage: str | None
    """Why what was granted is not known."""


@dataclass(frozen=True, slots=True)
class BusListing:
    writers: list[WriterRow]
    total: Totals
    plan: PlanRow

    def to_json(self) -> str:
        plan = asdict(self.plan)
        # Named, not [1, 2, 3].
        plan["checkpoint"] = self.plan.checkpoint and self.plan.checkpoint._asdict()
        plan["credit"] = self.plan.credit and self.plan.credit._asdict()
        listing = {"writers": [asdict(row) for row in self.writers], "total": asdict(self.total)}
        return json.dumps(listing | {"plan": plan}, indent=1, allow_nan=False)


def collect(paths: BusPaths, checkpoint: PlanPosition | None) -> BusListing:
    """Counts from logs and folders; no shard is opened.

    Args:
        checkpoint: where the newest checkpoint of the run is in the plan.

    Raises:
        BusError: not a bus of this format, or a damaged log or plan.
    """
    writers = inventory.take_all(paths)
    chain = read_chain(paths)
    credit, damage = _credit(paths, chain)
    retired = credit.retired_guid_below if credit else 0
    rows = [_row(paths, writer, retired) for writer in writers]
    planned = sum(step.num_trajectories for step in chain.steps)
    steps = max((step.step for step in chain.steps), default=0)
    return BusListing(
        writers=rows,
        total=_total(rows),
        plan=PlanRow(chain.links, steps, planned, checkpoint, credit, damage),
    )


def text(listing: BusListing) -> str:
    """A table of the writers, and a line for each fact of the plan."""
    head = ("writer", "role", "state", "fence", "live", "retired", "missing", "trajectories",
            "tokens", "on disk", "per s", "policies", "guids")  # fmt: skip
    rows = [_cells(row) for row in listing.writers]
    total = ["total", "", "", "", *_counts(listing.total), "", ""]
    plan = listing.plan
    fences = [f"{fence} (kept {keep})" if keep else str(fence) for fence, keep in plan.fences]
    facts = [
        ("plan fences", ", ".join(fences) or "none yet"),
        ("planned", f"{plan.steps} steps, {plan.trajectories} trajectories"),
        ("checkpoint", _position(plan.checkpoint)),
        ("credits", plan.damage or _granted(plan.credit)),
    ]
    return f"{tables.align([head, *rows, total])}\n\n{tables.align(facts)}"


def _row(paths: BusPaths, writer: Writer, retired: int) -> WriterRow:
    files = [writer.files.get(paths.shard(writer.name, r.fence, r.seq)) for r in writer.shards]
    pairs = list(zip(writer.shards, files, strict=True))
    live = [(record, file) for record, file in pairs if file is not None]
    gone = [record for record, file in pairs if file is None]
    num_retired = sum(_may_be_gone(record, retired) for record in gone)
    shards = writer.shards
    whole = [record for record in shards if record.kind is not RecordKind.PARTIAL]
    return WriterRow(
        name=writer.name,
        role=writer.role,
        state="closed" if writer.is_closed else "open" if writer.log else "unused",
        fence=writer.fence,
        live_shards=len(live),
        retired_shards=num_retired,
        missing_shards=len(gone) - num_retired,
        trajectories=sum(record.rows for record in whole),
        tokens=sum(record.tokens for record in whole),
        bytes_on_disk=sum(file.nbytes for file in writer.files.values()),
        policy_version_min=_lowest(r.policy_version_min for r in shards),
        policy_version_max=max((r.policy_version_max for r in shards), default=-1),
        guid_min=_lowest(r.guid_min for r in shards),
        guid_max=max((r.guid_max for r in shards), default=-1),
        trajectories_per_s=_rate(live),
    )


def _may_be_gone(record: CommitRecord, retired: int) -> bool:
    return record.kind is RecordKind.PARTIAL or record.guid_max < retired


def _total(rows: Sequence[WriterRow]) -> Totals:
    rates = [row.trajectories_per_s for row in rows if row.role == PRODUCER]
    known = [rate for rate in rates if rate is not None]
    return Totals(
        live_shards=sum(row.live_shards for row in rows),
        retired_shards=sum(row.retired_shards for row in rows),
        missing_shards=sum(row.missing_shards for row in rows),
        trajectories=sum(row.trajectories for row in rows if row.role == PRODUCER),
        tokens=sum(row.tokens for row in rows if row.role == PRODUCER),
        bytes_on_disk=sum(row.bytes_on_disk for row in rows),
        trajectories_per_s=sum(known) if known else None,
    )


def _lowest(values: Iterable[int]) -> int:
    return min((value for value in values if value >= 0), default=-1)


def _rate(live: Sequence[tuple[CommitRecord, File]]) -> float | None:
    """Rows per second between the first shard on disk and the last."""
    if len(live) < 2:
        return None
    seconds = live[-1][1].modified - live[0][1].modified
    return sum(record.rows for record, _ in live[1:]) / seconds if seconds > 0 else None


def _cells(row: WriterRow) -> list[str]:
    return [
        row.name,
        row.role,
        row.state,
        str(row.fence),
        *_counts(row),
        tables.span(row.policy_version_min, row.policy_version_max),
        tables.span(row.guid_min, row.guid_max),
    ]


def _counts(row: WriterRow | Totals) -> list[str]:
    rate = row.trajectories_per_s
    return [
        str(row.live_shards),
        str(row.retired_shards),
        str(row.missing_shards),
        str(row.trajectories),
        str(row.tokens),
        tables.size(row.bytes_on_disk),
        "-" if rate is None else f"{rate:.3g}",
    ]


def _position(position: PlanPosition | None) -> str:
    if position is None:
        return "none yet"
    return f"step {position.step}: {position.records} records of plan fence {position.fence}"


def _credit(paths: BusPaths, chain: Chain) -> tuple[Credit | None, str | None]:
    """The newest, or why it cannot be told."""
    for finding in check_credits(paths, chain):
        if finding.kind == "credits":
            return None, f"DAMAGED: {finding.where}: {finding.what}"
    return inventory.newest_credit(paths), None


def _granted(credit: Credit | None) -> str:
    if credit is None:
        return "none yet"
    finished = ", finished" if credit.finished else ""
    return (
        f"step {credit.step} trained, policy {credit.policy_version} published, "
        f"guids below {credit.retired_guid_below} may be deleted{finished}"
    )
