"""`bus export` and `bus media`: write trajectories to Parquet or JSON Lines, and media to files.

Rows come through `Reader`, as the trainer gets them, and leave in blocks: memory does not grow with
the run. A trained step is exported in the order in which the trainer saw it.
"""

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relax_hpc import schema
from relax_hpc.bus.plan import PlanRecord, ShardRange
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.shards import media
from relax_hpc.bus.shards.encode import PARTS
from relax_hpc.bus.tools import inventory
from relax_hpc.errors import BusError, ConfigError
from relax_hpc.runtime.files.records import compact, finite
from relax_hpc.runtime.files.user_files import write_named
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.runtime.text import align
from relax_hpc.schema import MediaKind, Trajectory, extra_columns

if TYPE_CHECKING:
    from relax_hpc.data.records import PromptRecord

BLOCK_BYTES = 32 << 20
"""Bytes of tokens buffered before a write; a Parquet row group."""
Decode = Callable[[Sequence[int]], str]
FindRow = Callable[[int, int], "PromptRecord | None"]


class ExportedRow(NamedTuple):
    row: Trajectory
    step: int
    part: ShardRange
    shard_row: int


class ExportColumn(NamedTuple):
    type: pa.DataType
    value: Callable[[ExportedRow], Any]
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
DATA = ("answer", "source", "metadata")
"""Columns of the row of the data."""


def columns_named(
    names: Sequence[str], decode: Decode | None, find: FindRow = lambda guid, index: None
) -> Columns:
    """Returns the requested columns in that order; all by default.

    Args:
        find: returns the row of the data of a guid and prompt index; the columns of `DATA` are null
            without one.

    Raises:
        ConfigError: no such column.
    """
    known = COLUMNS | _data_columns(find) | (_text_columns(decode) if decode else {})
    unknown = [name for name in names if name not in known]
    if unknown:
        remedy = "; add --text" if set(unknown) <= set(TEXT) else ""
        raise ConfigError(f"--columns {','.join(unknown)}: there are {', '.join([*known])}{remedy}")
    return {name: known[name] for name in names or known}


def parse_steps(text: str) -> tuple[int, int]:
    """Returns first and last step of "B" or "A:B".

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
    with write_named(target, "--to") as file, closing(make_sink(file, columns)) as sink:
        reads = [name for column in columns.values() for name in column.reads]
        for block in _blocks(_rows(paths, groups, reads)):
            sink.write(block)
            count += len(block)
            on_rows(count)
    return count


def _groups(paths: BusPaths, steps: tuple[int, int] | None) -> Iterable[PlanRecord]:
    if steps is None:
        return inventory.on_disk(paths)
    records = inventory.of_steps(paths, *steps)
    inventory.check_on_disk(paths, records)  # before the first row: no half of a step
    return (group for record in records for group in inventory.groups(record))


def _rows(
    paths: BusPaths, groups: Iterable[PlanRecord], reads: Sequence[str]
) -> Iterator[ExportedRow]:
    reader = Reader(paths)
    for record in inventory.merge_records(groups):
        rows = iter(reader.rows(record, range(record.num_trajectories), reads))
        for part in record.parts:
            for index in range(part.lo, part.hi):
                yield ExportedRow(next(rows), record.step, part, index)


def _blocks(sources: Iterable[ExportedRow]) -> Iterator[list[ExportedRow]]:
    block: list[ExportedRow] = []
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
    def write(self, block: list[ExportedRow]) -> None: ...
    def close(self) -> None: ...


class _ParquetSink:
    def __init__(self, file: BinaryIO, columns: Columns) -> None:
        self._columns = columns
        self._schema = pa.schema([(name, column.type) for name, column in columns.items()])
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")

    def write(self, block: list[ExportedRow]) -> None:
        arrays = [
            pa.array([column.value(source) for source in block], column.type)
            for column in self._columns.values()
        ]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


class _JsonLinesSink:
    def __init__(self, file: BinaryIO, columns: Columns) -> None:
        self._columns, self._file = columns, file

    def write(self, block: list[ExportedRow]) -> None:
        for source in block:
            row = {name: column.value(source) for name, column in self._columns.items()}
            said, _ = finite(row, _as_json)
            line = json.dumps(said, separators=(",", ":"), allow_nan=False) + "\n"
            self._file.write(line.encode())

    def close(self) -> None:
        pass


def _as_json(value: object) -> object:
    return (
        base64.b64encode(value).decode() if isinstance(value, bytes) else np.asarray(value).tolist()
    )


def _data_columns(find: FindRow) -> Columns:
    def column(of: Callable[["PromptRecord"], str]) -> ExportColumn:
        def value(exported: ExportedRow) -> str | None:
            row = find(exported.row.guid, exported.row.prompt_index)
            return None if row is None else of(row).encode(errors="replace").decode()

        return ExportColumn(pa.string(), value)

    return {
        "answer": column(lambda row: row.answer),
        "source": column(lambda row: row.source),
        "metadata": column(lambda row: compact(row.metadata)),
    }


def _text_columns(decode: Decode) -> Columns:
    return {
        "prompt": ExportColumn(
            pa.string(), lambda s: decode(s.row.token_ids[: s.row.prompt_len].tolist())
        ),
        "response": ExportColumn(
            pa.string(), lambda s: decode(s.row.token_ids[s.row.prompt_len :].tolist())
        ),
    }


SINKS: dict[str, Callable[[BinaryIO, Columns], Sink]] = {
    ".parquet": _ParquetSink,
    ".jsonl": _JsonLinesSink,
}


_OTHERS = {MediaKind.JPEG: "jpg", MediaKind.FRAMES: "zip", MediaKind.TENSOR: "npy"}
ENDINGS: dict[MediaKind, str] = {kind: _OTHERS.get(kind, kind.name.lower()) for kind in MediaKind}


class ExportedMedium(NamedTuple):
    path: Path
    kind: str
    nbytes: int
    patches: str
    tokens: int
    canonical_xxh3: str


def write(paths: BusPaths, guid: int, folder: Path) -> list[ExportedMedium]:
    """Writes each medium of a prompt group once, with its bytes from the bus.

    Returns:
        The files, in the order of the media.

    Raises:
        BusError: no such group, one without media, or damage.
        ConfigError: a file exists already, or cannot be written.
    """
    record = inventory.of_guid(paths, guid)
    inventory.check_on_disk(paths, [record])
    reader = Reader(paths)
    rows = reader.rows(record, range(record.num_trajectories), media.FACTS)
    wanted = [(row, n) for row, found in enumerate(rows) for n in range(len(found.media))]
    if not wanted:
        raise BusError(f"prompt group {guid}: has no media; relax-hpc bus show shows its text")
    tokens, files = dict[str, int](), list[ExportedMedium]()
    distinct: dict[str, tuple[int, int]] = {}
    for key, each in zip(wanted, reader.media(record, wanted), strict=True):
        distinct.setdefault(each.place, key)
        spans = rows[key[0]].media_spans
        tokens.setdefault(each.place, int(spans[spans[:, 0] == key[1], 2].sum()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}; name another folder") from None
    for number, each in enumerate(reader.media(record, distinct.values())):
        medium = each.medium
        path = folder / f"guid{guid}_{number}.{ENDINGS[medium.kind]}"
        with write_named(path, "--out") as file:
            file.write(medium.data.tobytes())
        patches = " x ".join(map(str, medium.grid_thw)) if any(medium.grid_thw) else "-"
        digest = medium.canonical_xxh3.hex() or "-"
        files.append(
            ExportedMedium(
                path, medium.kind.name, len(medium.data), patches, tokens[each.place], digest
            )
        )
    reader.close()
    return files


def text(files: list[ExportedMedium]) -> str:
    head = ("file", "kind", "bytes", "patches", "tokens", "canonical array")
    return align([head, *(tuple(map(str, file)) for file in files)])
