"""`bus show`: a shard, a step of the plan, or a prompt group, as a person wants to see it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from relax_hpc.bus.plan import PlanRecord
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.bus.staleness import staleness
from relax_hpc.bus.tools import selection
from relax_hpc.errors import BusError
from relax_hpc.paths import BusPaths
from relax_hpc.schema import COLUMNS, FinishReason, Trajectory, extra_columns
from relax_hpc.telemetry import tables

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
"""Tokens to text."""


def shard(path: Path) -> str:
    """Attributes, columns and first rows of a shard; whole columns are verified on the way.

    Raises:
        BusError: not a shard, torn, damaged or of a newer format.
    """
    with Shard(path) as opened:
        opened.verify()
        head = [("file", str(path)), ("bytes", opened.length), ("verified", "all checksums match")]
        sections = [
            tables.align([(key, str(value)) for key, value in [*head, *opened.attributes.items()]]),
            tables.align(
                [("column", "dtype", "shape", "bytes", "writer", "meaning"), *_columns(opened)]
            ),
            tables.align([("row", *_ROW_TABLE), *_rows(opened)]),
        ]
    if opened.rows > FIRST_ROWS:
        sections[-1] += f"\n... {opened.rows - FIRST_ROWS} more rows"
    return "\n\n".join(sections)


def step(paths: BusPaths, number: int) -> str:
    """The prompt groups of a step: where each lies, how stale it is, what widens it.

    Raises:
        BusError: not a bus of this format, damage, or a step that is not planned yet.
    """
    reader = Reader(paths)
    lines: list[tuple[str, ...]] = [_GROUP_TABLE]
    records = selection.of_steps(paths, number, number)
    for record in records:
        lines += [_group(paths, reader, group) for group in selection.groups(record)]
    count = sum(record.num_trajectories for record in records)
    title = f"step {number}: {len(lines) - 1} prompt groups, {count} trajectories"
    return f"{title}\n\n{tables.align(lines)}"


def group(paths: BusPaths, guid: int, decode: Decode | None) -> str:
    """The trajectories of a prompt group, field by field.

    Args:
        decode: shows the tokens as text; without it they are numbers.

    Raises:
        BusError: not a bus of this format, damage, or no such group.
    """
    record = selection.of_guid(paths, guid)
    part = record.parts[0]
    if gone := selection.deleted(paths, [record]):
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
    return tables.align(facts)


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
