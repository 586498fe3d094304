"""`bus ls` and `bus show`, during the run or afterwards.

`ls` shows every writer and the plan in a line each, `show` a shard, a step of the plan, or a prompt
group.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from relax_hpc.bus.credits import Credit
from relax_hpc.bus.log import CommitRecord, RecordKind
from relax_hpc.bus.plan import Chain, PlanPosition, PlanRecord, read_chain
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.bus.staleness import staleness
from relax_hpc.bus.tools import inventory
from relax_hpc.bus.tools.inventory import CommittedShard, Writer
from relax_hpc.bus.tools.verify import check_credits
from relax_hpc.errors import BusError
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.runtime.text import align, format_size, format_span
from relax_hpc.schema import COLUMNS, PRODUCER, FinishReason, Trajectory, extra_columns


@dataclass(frozen=True, slots=True)
class WriterRow:
    """A producer or sidecar writer; -1 where there is no version or no guid."""

    name: str
    role: str
    state: str
    """open, closed (it ended on purpose), or unused; open does not mean that it is alive."""
    fence: int
    live_shards: int
    retired_shards: int
    """Shards deleted by their owner, as the trainer allowed."""
    missing_shards: int
    """Shards gone although the trainer did not allow it; must be 0."""
    trajectories: int
    """Committed since the run began, as `tokens`."""
    tokens: int
    bytes_on_disk: int
    policy_version_min: int
    policy_version_max: int
    guid_min: int
    guid_max: int
    trajectories_per_s: float | None
    """Over the files on disk, by modification time; None for fewer than two."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Files of all writers; trajectories and tokens of the producers only, as sidecars repeat
    them."""

    live_shards: int
    retired_shards: int
    missing_shards: int
    trajectories: int
    tokens: int
    bytes_on_disk: int
    trajectories_per_s: float | None


@dataclass(frozen=True, slots=True)
class PlanRow:
    """The plan and the trainer's grant."""

    fences: list[tuple[int, int]]
    """(incarnation of the trainer, records it kept of those before), oldest first."""
    steps: int
    trajectories: int
    checkpoint: PlanPosition | None
    credit: Credit | None
    """None before the first trainer has started."""
    damage: str | None


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


def list_writers(paths: BusPaths, checkpoint: PlanPosition | None) -> BusListing:
    """Counts from logs and folders; opens no shard.

    Args:
        checkpoint: position of the newest checkpoint in the plan.

    Raises:
        BusError: not a bus of this format, or a damaged log or plan.
    """
    writers = inventory.read_writers(paths)
    chain = read_chain(paths)
    credit, damage = _credit(paths, chain)
    retired = credit.retired_guid_below if credit else 0
    rows = [_row(writer, retired) for writer in writers]
    planned = sum(step.num_trajectories for step in chain.steps)
    steps = max((step.step for step in chain.steps), default=0)
    return BusListing(
        writers=rows,
        total=_total(rows),
        plan=PlanRow(chain.links, steps, planned, checkpoint, credit, damage),
    )


def listing_text(listing: BusListing) -> str:
    """Returns a table of the writers, and a line for each fact of the plan."""
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
        ("credits", plan.damage or _describe_credit(plan.credit)),
    ]
    return f"{align([head, *rows, total])}\n\n{align(facts)}"


def _row(writer: Writer, retired: int) -> WriterRow:
    live = [shard for shard in writer.shards if shard.file is not None]
    gone = [shard.record for shard in writer.shards if shard.file is None]
    num_retired = sum(_may_be_gone(record, retired) for record in gone)
    shards = [shard.record for shard in writer.shards]
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
        bytes_on_disk=sum(file.nbytes for file in writer.files),
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


def _rate(live: Sequence[CommittedShard]) -> float | None:
    times = [shard.file.modified for shard in live if shard.file]
    seconds = times[-1] - times[0] if times else 0.0
    return sum(shard.record.rows for shard in live[1:]) / seconds if seconds > 0 else None


def _cells(row: WriterRow) -> list[str]:
    return [
        row.name,
        row.role,
        row.state,
        str(row.fence),
        *_counts(row),
        format_span(row.policy_version_min, row.policy_version_max),
        format_span(row.guid_min, row.guid_max),
    ]


def _counts(row: WriterRow | Totals) -> list[str]:
    rate = row.trajectories_per_s
    return [
        str(row.live_shards),
        str(row.retired_shards),
        str(row.missing_shards),
        str(row.trajectories),
        str(row.tokens),
        format_size(row.bytes_on_disk),
        "-" if rate is None else f"{rate:.3g}",
    ]


def _position(position: PlanPosition | None) -> str:
    if position is None:
        return "none yet"
    return f"step {position.step}: {position.records} records of plan fence {position.fence}"


def _credit(paths: BusPaths, chain: Chain) -> tuple[Credit | None, str | None]:
    for finding in check_credits(paths, chain):
        if finding.kind == "credits":
            return None, f"DAMAGED: {finding.where}: {finding.what}"
    return inventory.newest_credit(paths), None


def _describe_credit(credit: Credit | None) -> str:
    if credit is None:
        return "none yet"
    finished = ", finished" if credit.finished else ""
    return (
        f"step {credit.step} trained, policy {credit.policy_version} published, "
        f"guids below {credit.retired_guid_below} may be deleted{finished}"
    )


FIRST_ROWS = 8
_ROW_TABLE = {
    "guid": "row/guid",
    "sibling": "row/sibling",
    "segment": "row/segment",
    "reward": "row/rewards",
    "failed": "row/reward_error",
    "oldest": "row/policy_version_min",
    "newest": "row/policy_version_max",
    "prompt": "row/prompt_len",
    "response": "row/response_len",
    "finish": "row/finish",
}
_GROUP_TABLE = ("guid", "shard", "rows", "tokens", "staleness", "reward", "sidecars")
Decode = Callable[[Sequence[int]], str]


def shard(path: Path) -> str:
    """Returns attributes, columns and first rows of a shard; verifies whole columns on the way.

    Raises:
        BusError: not a shard, torn, damaged or of a newer format.
    """
    with Shard(path) as opened:
        opened.verify()
        head = [("file", str(path)), ("bytes", opened.length), ("verified", "all checksums match")]
        sections = [
            align([(key, str(value)) for key, value in [*head, *opened.attributes.items()]]),
            align([("column", "dtype", "shape", "bytes", "writer", "meaning"), *_columns(opened)]),
            align([("row", *_ROW_TABLE), *_rows(opened)]),
        ]
    if opened.rows > FIRST_ROWS:
        sections[-1] += f"\n... {opened.rows - FIRST_ROWS} more rows"
    return "\n\n".join(sections)


def step(paths: BusPaths, number: int) -> str:
    """Returns the prompt groups of a step with place, staleness and sidecars.

    Raises:
        BusError: not a bus of this format, damage, or a step that is not planned yet.
    """
    reader = Reader(paths)
    lines: list[tuple[str, ...]] = [_GROUP_TABLE]
    records = inventory.of_steps(paths, number, number)
    for record in records:
        lines += [_group(paths, reader, group) for group in inventory.groups(record)]
    count = sum(record.num_trajectories for record in records)
    title = f"step {number}: {len(lines) - 1} prompt groups, {count} trajectories"
    return f"{title}\n\n{align(lines)}"


def group(paths: BusPaths, guid: int, decode: Decode | None) -> str:
    """Returns the trajectories of a prompt group, field by field.

    Args:
        decode: shows the tokens as text; without it they are numbers.

    Raises:
        BusError: not a bus of this format, damage, or no such group.
    """
    record = inventory.of_guid(paths, guid)
    part = record.parts[0]
    if gone := inventory.find_deleted(paths, [record]):
        raise BusError(
            f"prompt group {guid}: {min(gone.values())[0]} is deleted, since a checkpoint covers "
            f"it; relax-hpc bus ls says what is left, bus.keep_steps keeps more"
        )
    rows = Reader(paths).rows(record, range(record.num_trajectories))
    where = f"step {record.step}" if record.step else "not planned yet"
    path = paths.shard(part.producer, part.fence, part.seq)
    title = f"prompt group {guid}: {where}, rows {part.lo}..{part.hi - 1} of {path}"
    return "\n\n".join([title, *(_trajectory(row, decode) for row in rows)])


def _group(paths: BusPaths, reader: Reader, record: PlanRecord) -> tuple[str, ...]:
    part = record.parts[0]
    path = paths.shard(part.producer, part.fence, part.seq)
    place = (str(path.relative_to(paths.root)), f"{part.lo}..{part.hi - 1}")
    if not path.exists():
        return (str(record.guids[0]), *place, "-", "-", "-", "deleted")
    index = reader.index(record)
    oldest = min((v for v in index.policy_version_min.tolist() if v >= 0), default=None)
    lag = "-" if oldest is None else str(staleness(record.step, oldest))
    tokens = int(index.prompt_len.sum() + index.response_len.sum())
    failed = int(index.reward_error.sum())  # they have a reward, too
    return (
        str(record.guids[0]),
        *place,
        str(tokens),
        lag,
        f"{index.rewards.mean():.3g}" + f" ({failed} failed)" * bool(failed),
        ", ".join(record.sidecars.get(part.uuid, {})) or "-",
    )


def _trajectory(row: Trajectory, decode: Decode | None) -> str:
    facts = [
        ("sibling", str(row.sibling)),
        ("segment", str(row.segment)),
        ("prompt", f"line {row.prompt_index}, {row.prompt_len} tokens"),
        ("seed", str(row.seed)),
        ("reward", f"{row.reward:g}" + ", failed" * row.reward_error),
        *([("parts", _parts(row))] if row.parts else []),
        ("finish", row.finish.name.lower()),
        ("policies", ", ".join(f"{v} from token {t}" for t, v in row.version_runs.tolist())),
        ("given", _words(row.token_ids[: row.prompt_len], decode)),
        ("response", _words(row.token_ids[row.prompt_len :], decode)),
        ("sampled", f"{int(row.loss_mask.sum())} of {len(row.token_ids)} tokens"),
    ]
    sampled = row.loss_mask == 1
    for name in extra_columns("token"):
        values = np.asarray(row.columns.get(name, ()), np.float32)
        if len(values):
            mean = f"mean {values[sampled].mean():.4g} over sampled tokens" if any(sampled) else "-"
            facts.append((name, mean))
    if row.media:
        facts.append(("media", ", ".join(f"{m.kind.name} {len(m.data)} B" for m in row.media)))
    if row.routed_experts is not None:
        facts.append(("routed experts", " x ".join(map(str, row.routed_experts.shape))))
    return align(facts)


def _parts(row: Trajectory) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in row.parts.items())


def _words(tokens: npt.NDArray[np.int32], decode: Decode | None) -> str:
    return repr(decode(tokens.tolist())) if decode else " ".join(map(str, tokens.tolist()))


def _columns(shard: Shard) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for name, field in shard.fields.items():
        column = COLUMNS.get(name)
        writer, meaning = (column.writer, column.meaning) if column else ("", "row boundaries")
        shape = " x ".join(map(str, field.shape))
        dtype = np.dtype(field.dtype).name
        lines.append((name, dtype, shape, f"{field.nbytes}", writer, meaning))
    return lines


def _rows(shard: Shard) -> list[tuple[str, ...]]:
    count = min(shard.rows, FIRST_ROWS)
    values = [
        [_cell(name, value) for value in shard.read_rows(column, 0, count).tolist()]
        if column in shard.fields
        else ["-"] * count
        for name, column in _ROW_TABLE.items()
    ]
    return [(str(row), *cells) for row, cells in enumerate(zip(*values, strict=True))]


def _cell(name: str, value: int | float) -> str:
    if name == "finish":
        return FinishReason(int(value)).name.lower()
    return str(value) if isinstance(value, int) else f"{value:g}"
