"""The meaning of a shard's bytes, for its writer and its reader. docs/bus.md has the tables."""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from relax_hpc.schema import COLUMNS, OFFSETS, Axis

PLAIN_FORMAT = 1
"""Format of a shard without compressed columns: any reader can read it."""
FORMAT = 2
"""Newest format, of shards with compressed columns; a shard says the oldest that suffices."""
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
NAMES_OF_PARTS = "score_parts"
"""Attribute: a JSON list of the names of the parts in `row/score_parts`, if there is
that column."""
CODEC = "shuffle+zstd+fletcher32"
"""HDF5's filters 2, 32015 and 3, in this order; the only way a column is compressed."""


class ShardInfo(NamedTuple):
    """The part of a commit record that describes a shard."""

    uuid: str
    """32 hexadecimal digits."""
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
    """Uncompressed."""
    slot: int
    """CRC slot of its first MiB; the others follow. A compressed dataset has none."""
    codec: str = ""
    """`CODEC`, or nothing where the bytes lie in the file as they are."""


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Returns how long a dataset is, uncompressed."""
    return math.prod(shape) * np.dtype(dtype).itemsize
