"""The columns of a shard to be written: their bytes in pieces, and whether they fit the schema."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from relax_hpc.bus.shards.shard_format import DTYPES, ROW_OFFSETS, num_bytes
from relax_hpc.errors import BusError
from relax_hpc.schema import ANY_WIDTH, COLUMNS, MEDIUM_AXES, OFFSETS, Array, Axis, ColumnPieces

_OFFSET_AXES: dict[str, Axis] = {name: axis for axis, name in OFFSETS.items()}


class Payload(NamedTuple):
    """One column: arrays that will lie end to end."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        return num_bytes(self.dtype, self.shape)

    @property
    def buffers(self) -> list[memoryview]:
        return [p.reshape(-1).view(np.uint8).data for p in self.pieces if p.size]

    def joined(self) -> Array:
        return self.pieces[0] if len(self.pieces) == 1 else np.concatenate(self.pieces)


def payloads(columns: ColumnPieces, role: str) -> dict[str, Payload]:
    """Takes columns as they are, without copying what is contiguous.

    Args:
        role: whose shard it is; "" if nobody's in particular.

    Returns:
        Index and row columns first: the reader's first 64 KiB then hold most of them.

    Raises:
        BusError: a column is unknown, of another dtype or length, or not this role's to write.
    """
    if ROW_OFFSETS not in columns:
        raise BusError(f"columns of a shard lack {ROW_OFFSETS}")
    folders = ("index", "row", "media", "ragged")
    for name in columns:
        if name not in DTYPES:
            raise BusError(f"{name}: there is no such column in schema.COLUMNS")
    ordered = sorted(columns, key=lambda name: folders.index(name.split("/")[0]))
    found = {name: _payload(name, columns[name]) for name in ordered}
    offsets = {name: found[name].joined() for name in found if name in _OFFSET_AXES}
    media = len(offsets.get(OFFSETS["media_byte"], [0]))
    for name, values in offsets.items():
        is_of_media = _OFFSET_AXES[name] in MEDIUM_AXES
        _check_offsets(name, values, media if is_of_media else len(offsets[ROW_OFFSETS]))
    for name, payload in found.items():
        if name in COLUMNS:
            _check_column(name, payload, offsets, role)
    return found


def _payload(name: str, values: Array | Sequence[Array]) -> Payload:
    pieces = [values] if isinstance(values, np.ndarray) else list(values)
    if not pieces:
        raise BusError(f"{name}: no piece given; an empty column is an empty array")
    dtype, width = np.dtype(DTYPES[name]), pieces[0].shape[1:]
    for piece in pieces:
        if piece.dtype != dtype:
            raise BusError(f"{name}: {piece.dtype} given, schema.COLUMNS says {dtype}")
        if not piece.ndim or piece.shape[1:] != width:
            raise BusError(f"{name}: pieces of shapes {pieces[0].shape} and {piece.shape}")
    rows = sum(len(piece) for piece in pieces)
    return Payload(dtype.str, (rows, *width), tuple(map(np.ascontiguousarray, pieces)))


def _check_offsets(name: str, offsets: Array, entries: int) -> None:
    if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise BusError(f"{name}: offsets begin with 0 and never fall")
    if len(offsets) != entries:
        whose = OFFSETS["media_byte"] if _OFFSET_AXES[name] in MEDIUM_AXES else ROW_OFFSETS
        raise BusError(f"{name}: {len(offsets)} entries, {entries} expected, as of {whose}")


def _check_column(name: str, payload: Payload, offsets: Mapping[str, Array], role: str) -> None:
    column = COLUMNS[name]
    if role and column.writer != role:
        raise BusError(f"{name}: is written by {column.writer}, this shard is of role {role}")
    if column.axis == "row":
        expected = len(offsets[ROW_OFFSETS]) - 1
    else:
        needed = OFFSETS["media_byte" if column.axis == "medium" else column.axis]
        if needed not in offsets:
            raise BusError(f"{name}: its offsets {needed} are missing")
        ends = offsets[needed]
        expected = len(ends) - 1 if column.axis == "medium" else int(ends[-1])
    width = payload.shape[1:]
    fits = len(width) == 1 if column.width == ANY_WIDTH else width == _shape(column.width)
    if payload.shape[0] != expected or not fits:
        raise BusError(f"{name}: shape {payload.shape}, {expected} x {column.width or 1} expected")


def _shape(width: int | None) -> tuple[int, ...]:
    return () if width is None else (width,)
