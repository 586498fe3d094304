"""Defines the bytes of a shard for its writer and reader; docs/reference/bus.md has the tables."""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from relax_hpc.schema import ANY_WIDTH, COLUMNS, MEDIUM_AXES, OFFSETS, Axis, Column

PLAIN_FORMAT = 1
"""Format of a shard without compressed columns: any reader can read it."""
FORMAT = 2
"""Newest format, of shards with compressed columns; a shard names the oldest that suffices."""
MAGIC = b"\x89RLS1\r\n\x1a"  # like PNG's: catches text-mode damage
# magic, format, user block, file length, rows, uuid, table bytes, CRC slots, CRC of both, CRC of
# this header. These 64 bytes mean the same in every format version.
HEADER = struct.Struct("<8sIIQQ16sIIII")
BLOCK = 1 << 20
"""Bytes per CRC32C, counted from the start of each dataset."""
ROW_OFFSETS = "index/offsets"
DTYPES = {name: column.dtype for name, column in COLUMNS.items()} | dict.fromkeys(
    OFFSETS.values(), "int64"
)
MEDIA_AXES: tuple[Axis, ...] = ("media_ref", "medium", "media_byte", "media_frame")
_OFFSET_AXES: dict[str, Axis] = {name: axis for axis, name in OFFSETS.items()}
_ROW_AXES = OFFSETS.keys() - set(MEDIUM_AXES)
NAMES_OF_PARTS = "score_parts"
"""Attribute: a JSON list of the names of the parts in `row/score_parts`, if the column exists."""
CODEC = "shuffle+zstd+fletcher32"
"""HDF5's filters 2, 32015 and 3, in this order; the only compression we use."""


class ShardInfo(NamedTuple):
    """The part of a commit record that describes a shard."""

    uuid: str
    length: int
    rows: int
    tokens: int


class Field(NamedTuple):
    """One dataset, as the user block describes it."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Absolute, of the first byte; 0 if it is empty or compressed."""
    nbytes: int
    slot: int
    """CRC slot of its first MiB; the others follow. Compressed datasets have none."""
    codec: str = ""
    """`CODEC`, or empty if uncompressed."""


def fields_of(
    table: Mapping[str, Mapping[str, Any]], length: int, rows: int, num_checksums: int
) -> dict[str, Field]:
    """Returns the datasets that a table names, each within the file and its checksums.

    Args:
        table: name of a dataset -> the facts of `Field`.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: an impossible dataset.
    """
    fields = {}
    for name, values in table.items():
        field = Field(**{**values, "shape": tuple(values["shape"])})
        if not _fits(name, field, rows):
            raise ValueError(f"{name} is {field.dtype} {field.shape} in a shard of {rows} rows")
        num_blocks, end = -(-field.nbytes // BLOCK), field.offset + field.nbytes
        lies_within = HEADER.size <= field.offset and end <= length
        is_summed = 0 <= field.slot <= num_checksums - num_blocks
        if not field.codec and field.nbytes and not (lies_within and is_summed):
            raise ValueError(f"bytes {field.offset} to {end} of {length} are {name}")
        fields[name] = field
    return fields


def _fits(name: str, field: Field, rows: int) -> bool:
    dtype, column = np.dtype(field.dtype), COLUMNS.get(name)
    sound = not dtype.hasobject and all(isinstance(n, int) and n >= 0 for n in field.shape)
    if not sound or not field.shape or field.nbytes != num_bytes(field.dtype, field.shape):
        return False
    if dtype != DTYPES.get(name, dtype):
        return False
    size, *width = field.shape
    if column is None:
        return _OFFSET_AXES.get(name) not in _ROW_AXES or (size, width) == (rows + 1, [])
    wide = len(width) == 1 if column.width == ANY_WIDTH else width == _width(column)
    return wide and (column.axis != "row" or size == rows)


def _width(column: Column) -> list[int]:
    return [] if column.width is None else [column.width]


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize
