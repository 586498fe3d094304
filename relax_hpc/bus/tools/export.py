"""`bus export`: trajectories as rows of Parquet or JSON Lines, for any tool that reads those.

Rows come through `Reader`, as the trainer gets them, and leave in blocks: memory does not grow with
the run. A step that was trained on is exported in the order in which the trainer saw it.
"""

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relax_hpc import schema
from relax_hpc.bus.plan import Part, PlanRecord
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.shards import media
from relax_hpc.bus.shards.encode import PARTS
from relax_hpc.bus.tools import selection
from relax_hpc.errors import ConfigError
from relax_hpc.paths import BusPaths
from relax_hpc.records import finite
from relax_hpc.schema import Trajectory, extra_columns
from relax_hpc.user_files import written

BLOCK_BYTES = 32 << 20
"""Tokens' worth of rows that are held before they are written; a Parquet row group."""
Decode = Callable[[Sequence[int]], str]


class Source(NamedTuple):
    """A trajectory, and where it lies."""

    row: Trajectory
    step: int
    part: Part
    """Prompt group of a row."""
    shard_row: int


class ExportColumn(NamedTuple):
    type: pa.DataType
    value: Callable[[Source], Any]
    reads: tuple[str, ...] = ()
    """Columns of the schema that are read only for this one."""


Columns = dict[str, ExportColumn]

_MEDIUM = pa.struct(
    [
        ("kind", pa.string()),
        ("data", pa.binary()),
        ("grid_thw", pa.list_(pa.int32())),
        ("canonical_xxh3", pa.string()),
        ("frames", pa.list_(pa.int32())),
        ("seconds_per_grid", pa.float32()),
    ]
)


def _by_token(name: str, column: str) -> ExportColumn:
    numbers = pa.from_numpy_dtype(np.dtype(schema.COLUMNS[column].dtype))
    return ExportColumn(pa.list_(numbers), lambda s: s.row.columns.get(name), (column,))


COLUMNS: Columns = {
    # where it is; step is null for what no step trains on, or not yet
    "step": ExportColumn(pa.int64(), lambda s: s.step or None),
    "producer": ExportColumn(pa.string(), lambda s: s.part.producer),
    "shard": ExportColumn(pa.string(), lambda s: s.part.uuid),
    "shard_row": ExportColumn(pa.int64(), lambda s: s.shard_row),
    # who it is
    "guid": ExportColumn(pa.int64(), lambda s: s.row.guid),
    "sibling": ExportColumn(pa.int32(), lambda s: s.row.sibling),
    "segment": ExportColumn(pa.int32(), lambda s: s.row.segment),
    "prompt_index": ExportColumn(pa.int64(), lambda s: s.row.prompt_index),
    "seed": ExportColumn(pa.int64(), lambda s: s.row.seed),
    "environment": ExportColumn(pa.int16(), lambda s: s.row.environment),
    # what was sampled
    "prompt_len": ExportColumn(pa.int32(), lambda s: s.row.prompt_len),
    "response_len": ExportColumn(pa.int32(), lambda s: len(s.row.token_ids) - s.row.prompt_len),
    "finish": ExportColumn(pa.string(), lambda s: s.row.finish.name.lower()),
    "reward": ExportColumn(pa.float32(), lambda s: s.row.reward),
    "reward_error": ExportColumn(pa.bool_(), lambda s: s.row.reward_error),
    "parts": ExportColumn(
        pa.map_(pa.string(), pa.float32()), lambda s: list(s.row.parts.items()), (PARTS,)
    ),
    "policy_version_min": ExportColumn(pa.int32(), lambda s: s.row.policy_version_min),
    "policy_version_max": ExportColumn(pa.int32(), lambda s: s.row.policy_version_max),
    "token_ids": ExportColumn(pa.list_(pa.int32()), lambda s: s.row.token_ids),
    "loss_mask": ExportColumn(pa.list_(pa.uint8()), lambda s: s.row.loss_mask),
    "version_runs": ExportColumn(
        pa.list_(pa.list_(pa.int32(), 2)), lambda s: s.row.version_runs.tolist()
    ),
    # what else there is of every token; null where nobody wrote it
    **{name: _by_token(name, column) for name, column in extra_columns("token").items()},
    # what it looked at, and which experts it took
    "media": ExportColumn(
        pa.list_(_MEDIUM),
        lambda s: [
            {
                "kind": m.kind.name.lower(),
                "data": m.data.tobytes(),
                "grid_thw": list(m.grid_thw),
                "canonical_xxh3": m.canonical_xxh3.hex(),
                "frames": list(m.frames),
                "seconds_per_grid": m.seconds_per_grid,
            }
            for m in s.row.media
        ],
        (media.BYTES, *media.FACTS),
    ),
    "media_spans": ExportColumn(
        pa.list_(pa.list_(pa.int32(), 3)), lambda s: s.row.media_spans.tolist(), (media.SPANS,)
    ),
    "routed_experts": ExportColumn(
        pa.list_(pa.list_(pa.int16())),
        lambda s: None if s.row.routed_experts is None else s.row.routed_experts.tolist(),
        ("ragged/routed_experts",),
    ),
}
TEXT = ("prompt", "response")
"""Columns that need a tokenizer."""


def columns_named(names: Sequence[str], decode: Decode | None) -> Columns:
    """The columns asked for, in that order; all of them if none are named.

    Raises:
        ConfigError: no such column.
    """
    known = COLUMNS | (_text_columns(decode) if decode else {})
    unknown = [name for name in names if name not in known]
    if unknown:
        remedy = "; add --text" if set(unknown) <= set(TEXT) else ""
        raise ConfigError(f"--columns {','.join(unknown)}: there are {', '.join([*known])}{remedy}")
    return {name: known[name] for name in names or known}


def parse_steps(text: str) -> tuple[int, int]:
    """First and last step of "B" or "A:B".

    Raises:
        ConfigError: neither.
    """
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if found is None:
        raise ConfigError(f"--step {text}: give a step, or the first and the last: 10:12")
    return int(found[1]), int(found[2] or found[1])


def export(
    paths: BusPaths,
    target: Path,
    columns: Columns,
    steps: tuple[int, int] | None,
    on_rows: Callable[[int], None],
) -> int:
    """Writes rows to `target`, which appears when it is complete.

    Args:
        target: ends in .parquet or .jsonl.
        steps: first and last step, in the trainer's order; None for all there is on disk.
        on_rows: called with the number of rows so far.

    Returns:
        Rows written.

    Raises:
        ConfigError: another ending, or `target` is there or cannot be written.
        BusError: damage, a step that is not planned, or one whose shards are deleted.
    """
    make_sink = SINKS.get(target.suffix)
    if make_sink is None:
        raise ConfigError(f"--to {target}: must end in {' or '.join(SINKS)}")
    groups = _groups(paths, steps)
    count = 0
    with written(target, "--to") as draft, closing(make_sink(draft, columns)) as sink:
        reads = [name for column in columns.values() for name in column.reads]
        for block in _blocks(_rows(paths, groups, reads)):
            sink.write(block)
            count += len(block)
            on_rows(count)
    return count


def _groups(paths: BusPaths, steps: tuple[int, int] | None) -> Iterable[PlanRecord]:
    if steps is None:
        return selection.on_disk(paths)
    records = selection.of_steps(paths, *steps)
    selection.check_on_disk(paths, records)  # before the first row: no half of a step
    return (group for record in records for group in selection.groups(record))


def _rows(paths: BusPaths, groups: Iterable[PlanRecord], reads: Sequence[str]) -> Iterator[Source]:
    reader = Reader(paths)
    for record in selection.merged(groups):
        rows = iter(reader.rows(record, range(record.num_trajectories), reads))
        for part in record.parts:
            for index in range(part.lo, part.hi):
                yield Source(next(rows), record.step, part, index)


def _blocks(sources: Iterable[Source]) -> Iterator[list[Source]]:
    block: list[Source] = []
    nbytes = 0
    for source in sources:
        block.append(source)
        nbytes += sum(value.nbytes for value in source.row if isinstance(value, np.ndarray))
        nbytes += sum(medium.data.nbytes for medium in source.row.media)
        if nbytes >= BLOCK_BYTES:
            yield block
            block, nbytes = [], 0
    if block:
        yield block


class Sink(Protocol):
    """A file in the making."""

    def write(self, block: list[Source]) -> None: ...
    def close(self) -> None: ...


class _ParquetSink:
    def __init__(self, draft: Path, columns: Columns) -> None:
        self._columns = columns
        self._schema = pa.schema([(name, column.type) for name, column in columns.items()])
        self._writer = pq.ParquetWriter(draft, self._schema, compression="zstd")

    def write(self, block: list[Source]) -> None:
        arrays = [
            pa.array([column.value(source) for source in block], column.type)
            for column in self._columns.values()
        ]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


class _JsonLinesSink:
    def __init__(self, draft: Path, columns: Columns) -> None:
        self._columns = columns
        self._file = draft.open("w")

    def write(self, block: list[Source]) -> None:
        for source in block:
            row = {name: column.value(source) for name, column in self._columns.items()}
            said, _ = finite(row, _as_json)
            self._file.write(json.dumps(said, separators=(",", ":"), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def _as_json(value: object) -> object:
    return (
        base64.b64encode(value).decode() if isinstance(value, bytes) else np.asarray(value).tolist()
    )


def _text_columns(decode: Decode) -> Columns:
    return {
        "prompt": ExportColumn(
            pa.string(), lambda s: decode(s.row.token_ids[: s.row.prompt_len].tolist())
        ),
        "response": ExportColumn(
            pa.string(), lambda s: decode(s.row.token_ids[s.row.prompt_len :].tolist())
        ),
    }


SINKS: dict[str, Callable[[Path, Columns], Sink]] = {
    ".parquet": _ParquetSink,
    ".jsonl": _JsonLinesSink,
}
