"""A shard as a person wants to see it."""

from pathlib import Path

import numpy as np

from relax_hpc.bus.shard import Shard
from relax_hpc.schema import COLUMNS, FinishReason

FIRST_ROWS = 8
_ROW_TABLE = {
    "guid": "row/guid",
    "sibling": "row/sibling",
    "reward": "row/rewards",
    "oldest": "row/policy_version_min",
    "newest": "row/policy_version_max",
    "prompt": "row/prompt_len",
    "response": "row/response_len",
    "finish": "row/finish",
}


def describe(path: Path) -> str:
    """Attributes, columns and first rows of a shard; whole columns are verified on the way.

    Raises:
        BusError: not a shard, torn, damaged or of a newer format.
    """
    with Shard(path) as shard:
        shard.verify()
        head = [("file", str(path)), ("bytes", shard.length), ("verified", "all checksums match")]
        sections = [
            _align([(key, str(value)) for key, value in [*head, *shard.attributes.items()]]),
            _align([("column", "dtype", "shape", "bytes", "writer", "meaning"), *_columns(shard)]),
            _align([("row", *_ROW_TABLE), *_rows(shard)]),
        ]
    if shard.rows > FIRST_ROWS:
        sections[-1] += f"\n... {shard.rows - FIRST_ROWS} more rows"
    return "\n\n".join(sections)


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


def _align(lines: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
