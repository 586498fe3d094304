"""Publishing a shard: HDF5 metadata and payload with plain writes, the user block last."""

import json
import os
import struct
import uuid as uuidlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from relax_hpc.bus import hdf5
from relax_hpc.bus.durable import Buffer, BusFullError, checksum, is_full, pwrite_all, sync_folder
from relax_hpc.bus.hdf5 import Attribute
from relax_hpc.bus.shard_format import (
    BLOCK,
    DTYPES,
    FORMAT,
    HEADER,
    MAGIC,
    ROW_OFFSETS,
    Field,
    ShardInfo,
)
from relax_hpc.errors import BusError
from relax_hpc.schema import COLUMNS, OFFSETS, Columns

SMALL = 1 << 16
WRITE_BYTES = 64 << 20  # writes of about 1 MiB cost 5-10x the CPU of large ones
MIN_USER_BLOCK = 4096


def write(path: Path, columns: Columns, attributes: Mapping[str, Attribute]) -> ShardInfo:
    """Publishes `columns` at `path`, whole or not at all.

    Write beside it, flush, rename, flush the folder: after a crash the final name is absent or
    complete. Storage may report an error only at the flush or at close, so both come first.

    Args:
        columns: names and dtypes of `schema.COLUMNS`, with the offsets of every ragged axis.
        attributes: root attributes besides the format, uuid and number of rows.

    Raises:
        BusError: a column is unknown or of another dtype or length.
        BusFullError: no space left; the draft was removed.
    """
    _check(columns)
    uuid = uuidlib.uuid4().hex
    rows = len(columns[ROW_OFFSETS]) - 1
    root = {"rl_shard_format": FORMAT, "shard_uuid": uuid, "n_samples": rows, **attributes}
    arrays = {name: np.ascontiguousarray(columns[name]) for name in _ordered(columns)}
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            length = _write_file(fd, arrays, root)
            os.fsync(fd)
        finally:
            os.close(fd)
        draft.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        if is_full(error):
            remedy = "free space or raise the quota"
            raise BusFullError(f"{path}: {error.strerror}; {remedy}") from error
        raise BusError(f"{path}: cannot be written: {error.strerror}") from error
    return ShardInfo(uuid, length, rows, int(columns[ROW_OFFSETS][-1]))


def _ordered(columns: Columns) -> list[str]:
    """Index and row columns first: the reader's first 64 KiB then hold most of them."""
    folders = ("index", "row", "media", "ragged")
    return sorted(columns, key=lambda name: folders.index(name.split("/")[0]))


def _check(columns: Columns) -> None:
    if ROW_OFFSETS not in columns:
        raise BusError(f"columns of a shard lack {ROW_OFFSETS}")
    for name, values in columns.items():
        dtype = DTYPES.get(name)
        if dtype is None or values.dtype != np.dtype(dtype):
            raise BusError(f"{name}: {values.dtype} given, schema.COLUMNS says {dtype}")
        if name not in COLUMNS:
            continue
        width, expected = COLUMNS[name].width, _expected_length(name, columns)
        if values.shape[1:] != (() if width is None else (width,)) or (
            expected is not None and len(values) != expected
        ):
            raise BusError(f"{name}: shape {values.shape}, {expected} x {width or 1} expected")


def _expected_length(name: str, columns: Columns) -> int | None:
    axis = COLUMNS[name].axis
    if axis == "row":
        return len(columns[ROW_OFFSETS]) - 1
    if axis == "medium":
        return None
    if OFFSETS[axis] not in columns:
        raise BusError(f"{name}: its offsets {OFFSETS[axis]} are missing")
    return int(columns[OFFSETS[axis]][-1])


def _write_file(fd: int, arrays: Columns, attributes: Mapping[str, Attribute]) -> int:
    user_block = _user_block_size(arrays, attributes)
    datasets = [hdf5.Dataset(name, a.dtype.str, a.shape) for name, a in arrays.items()]
    skeleton = hdf5.lay_out(datasets, attributes, user_block=user_block)
    fields = _fields(arrays, skeleton.offsets)
    crcs: list[int] = []
    pieces: list[tuple[int, Buffer]] = list(skeleton.extents)
    for name, values in arrays.items():
        if values.nbytes:
            payload = values.reshape(-1).data.cast("B")
            crcs += [checksum(payload[at : at + BLOCK]) for at in range(0, len(payload), BLOCK)]
            pieces.append((fields[name].offset, payload))
    _write_pieces(fd, sorted(pieces, key=lambda piece: piece[0]), start=user_block)
    os.ftruncate(fd, skeleton.length)
    head = _head(fields, attributes, np.array(crcs, "<u4"), user_block, skeleton.length)
    pwrite_all(fd, head, 0)
    return skeleton.length


def _write_pieces(fd: int, pieces: Sequence[tuple[int, Buffer]], *, start: int) -> None:
    """Writes rising pieces; small neighbours and the gaps between them go out as one write."""
    pending, at = bytearray(), start
    for offset, data in pieces:
        gap = offset - at - len(pending)
        assert gap >= 0, "extents overlap"
        pending += bytes(gap)
        if len(data) <= SMALL:
            pending += data
            continue
        pwrite_all(fd, pending, at)
        for lo in range(0, len(data), WRITE_BYTES):
            pwrite_all(fd, data[lo : lo + WRITE_BYTES], offset + lo)
        pending, at = bytearray(), offset + len(data)
    pwrite_all(fd, pending, at)


def _fields(arrays: Columns, offsets: Mapping[str, int]) -> dict[str, Field]:
    fields, slot = {}, 0
    for name, values in arrays.items():
        dtype = values.dtype.str
        fields[name] = Field(dtype, values.shape, offsets[name], values.nbytes, slot)
        slot += -(-values.nbytes // BLOCK)
    return fields


def _user_block_size(arrays: Columns, attributes: Mapping[str, Attribute]) -> int:
    """Smallest legal size that holds the table, whatever the offsets turn out to be."""
    widest = _fields(arrays, dict.fromkeys(arrays, 1 << 62))
    num_crcs = sum(-(-values.nbytes // BLOCK) for values in arrays.values())
    need = HEADER.size + len(_table(widest, attributes)) + 4 * num_crcs
    return max(MIN_USER_BLOCK, 1 << (need - 1).bit_length())


def _table(fields: Mapping[str, Field], attributes: Mapping[str, Attribute]) -> bytes:
    table = {
        "fields": {name: field._asdict() for name, field in fields.items()},
        "attributes": dict(attributes),
    }
    return json.dumps(table, separators=(",", ":")).encode()


def _head(
    fields: Mapping[str, Field],
    attributes: Mapping[str, Attribute],
    crcs: npt.NDArray[np.uint32],
    user_block: int,
    length: int,
) -> bytes:
    table = _table(fields, attributes)
    body = table + crcs.tobytes()
    uuid = bytes.fromhex(str(attributes["shard_uuid"]))
    rows = int(attributes["n_samples"])
    parts = (MAGIC, FORMAT, user_block, length, rows, uuid, len(table), len(crcs), checksum(body))
    header = HEADER.pack(*parts, 0)[:-4]
    head = header + struct.pack("<I", checksum(header)) + body
    assert len(head) <= user_block
    return head.ljust(user_block, b"\0")
