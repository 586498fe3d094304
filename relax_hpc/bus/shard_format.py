"""What the bytes of a shard mean, for its writer and its reader. docs/bus.md has the tables."""

import struct
from typing import NamedTuple

from relax_hpc.schema import COLUMNS, OFFSETS

FORMAT = 1
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


class ShardInfo(NamedTuple):
    """What a commit record says about a shard."""

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
    """Absolute, of the first byte."""
    nbytes: int
    slot: int
    """CRC slot of its first MiB; the others follow."""
