"""Publishes a shard: HDF5 metadata and payload with plain writes, the user block last.

The payload goes from the producer's arrays to the kernel without a copy of ours. One thread writes
while another computes checksums, and writeback starts long before the fsync.
"""

import itertools
import json
import os
import struct
import uuid as uuidlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.bus.durable import (
    MAX_BUFFERS,
    BusFullError,
    block_checksums,
    is_full,
    pwrite_all,
    pwritev_all,
    start_writeback,
)
from relax_hpc.bus.shards import hdf5
from relax_hpc.bus.shards.hdf5 import Attribute
from relax_hpc.bus.shards.shard_format import (
    BLOCK,
    CODEC,
    DTYPES,
    FORMAT,
    HEADER,
    MAGIC,
    PLAIN_FORMAT,
    ROW_OFFSETS,
    Field,
    ShardInfo,
    num_bytes,
)
from relax_hpc.errors import BusError
from relax_hpc.runtime.files.records import Buffer, checksum, sync
from relax_hpc.runtime.files.storage import PASSING, patiently
from relax_hpc.schema import ANY_WIDTH, COLUMNS, MEDIUM_AXES, OFFSETS, Array, Axis, ColumnPieces

_OFFSET_AXES: dict[str, Axis] = {name: axis for axis, name in OFFSETS.items()}


class Payload(NamedTuple):
    """One column: arrays to write end to end."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        return num_bytes(self.dtype, self.shape)

    @property
    def buffers(self) -> list[memoryview]:
        return [p.reshape(-1).view(np.uint8).data for p in self.pieces if p.size]

    def join(self) -> Array:
        return self.pieces[0] if len(self.pieces) == 1 else np.concatenate(self.pieces)


def payloads(columns: ColumnPieces, role: str) -> dict[str, Payload]:
    """Checks columns against the schema, without copying contiguous ones.

    Args:
        role: whose shard it is; "" accepts every role.

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
    offsets = {name: found[name].join() for name in found if name in _OFFSET_AXES}
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


WRITE_BYTES = 4 << 20, 16 << 20
"""Least and most bytes of one write: storage starts early, and writes of 1 MiB cost 5-10x the CPU.
"""
MIN_USER_BLOCK = 4096
THREAD_FROM = 4 << 20
"""Bytes from which a second thread for the checksums is worth starting."""


def write(
    path: Path,
    columns: ColumnPieces,
    attributes: Mapping[str, Attribute],
    *,
    compress: Collection[str] = (),
    folder: int | None = None,
    spare: Path | None = None,
) -> ShardInfo:
    """Publishes `columns` at `path`, whole or not at all.

    Writes a draft, renames it, then flushes file and folder: after a kill the final name is absent
    or complete, and on return it is on disk. (A power cut may leave the name of a torn file, but
    only the commit record counts, which comes later.) Renaming first saves a journalling file
    system one commit. Storage may report an error only at the flush or at close.

    Args:
        columns: names and dtypes of `schema.COLUMNS`, with the offsets of every ragged axis.
        attributes: root attributes besides the format, uuid and number of rows.
        compress: columns to compress; pays below about 0.4 GB/s of file system per writer.
        folder: descriptor of the folder of `path`, to save opening it.
        spare: an obsolete file to overwrite, so that the file system need not free and allocate
            blocks.

    Raises:
        BusError: a column is unknown, of another dtype or length, or not this role's to write.
        BusFullError: no space left; the draft was removed.
    """
    found = payloads(columns, str(attributes.get("role", "")))
    offsets = found[ROW_OFFSETS].join()
    uuid, rows = uuidlib.uuid4().hex, len(offsets) - 1
    packed = frozenset(compress) & found.keys()
    version = FORMAT if packed else PLAIN_FORMAT
    root = {"rl_shard_format": version, "shard_uuid": uuid, "n_samples": rows, **attributes}
    drafts = (path.with_name(f".{path.name}.{os.getpid()}.{n}.tmp") for n in itertools.count())
    folders = itertools.chain([folder], itertools.repeat(None))  # the server may have forgotten it

    def publish() -> int:
        draft, open_folder = next(drafts), next(folders)
        try:
            fd = _open_draft(draft, spare)
            try:
                length = _write_file(fd, found, root, packed)
                if spare is not None:
                    os.ftruncate(fd, length)  # it may have been longer
                draft.rename(path)
                os.fsync(fd)
            finally:
                os.close(fd)
            if open_folder is None:
                sync(path.parent)
            else:
                os.fsync(open_folder)
        except OSError:
            for file in (draft, path):  # nobody was told of either
                with suppress(OSError):
                    file.unlink(missing_ok=True)
            raise
        return length

    try:
        length = patiently(path, publish, errors=PASSING)
    except OSError as error:
        if is_full(error):
            raise BusFullError(path, error) from error
        raise BusError(f"{path}: cannot be written: {error.strerror}") from error
    return ShardInfo(uuid, length, rows, int(offsets[-1]))


def _open_draft(draft: Path, spare: Path | None) -> int:
    if spare is not None:
        try:
            spare.rename(draft)
            return os.open(draft, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # then a new one
            pass
    return os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def _write_file(
    fd: int,
    columns: Mapping[str, Payload],
    attributes: Mapping[str, Attribute],
    packed: Collection[str],
) -> int:
    user_block = _user_block_size(columns, attributes, packed)
    datasets = [
        hdf5.Dataset(name, c.dtype, c.shape, c.join() if name in packed else None)
        for name, c in columns.items()
    ]
    skeleton = hdf5.lay_out(datasets, attributes, user_block=user_block)
    fields = _fields(columns, skeleton.offsets, packed)
    plain = {name: column.buffers for name, column in columns.items() if name not in packed}
    pieces: list[tuple[int, Sequence[Buffer]]] = [(at, [data]) for at, data in skeleton.extents]
    pieces += [(fields[name].offset, buffers) for name, buffers in plain.items() if buffers]
    pieces.sort(key=lambda piece: piece[0])
    # Cut first: the interpreter is slow in small pieces while another thread wants it too.
    batches = list(_batches(pieces, user_block, skeleton.length))
    with ThreadPoolExecutor(1, "checksums") as other:  # starts no thread before it must
        threads = skeleton.length >= THREAD_FROM
        summing = other.submit(_checksums, plain.values()) if threads else None
        for at, buffers, size in batches:
            pwritev_all(fd, buffers, at)
            start_writeback(fd, at, size)
        crcs = summing.result() if summing else _checksums(plain.values())
    pwrite_all(fd, _head(fields, attributes, crcs, user_block, skeleton.length), 0)
    return skeleton.length


def _checksums(columns: Iterable[Sequence[Buffer]]) -> npt.NDArray[np.uint32]:
    sums = [crc for buffers in columns for crc in block_checksums(buffers, BLOCK)]
    return np.array(sums, "<u4")


def _batches(
    pieces: Iterable[tuple[int, Sequence[Buffer]]], start: int, end: int
) -> Iterator[tuple[int, list[Buffer], int]]:
    """Yields (offset, buffers, bytes) of large writes of rising pieces, with zeros in the gaps."""
    limit = min(max((end - start) // 8, WRITE_BYTES[0]), WRITE_BYTES[1])
    batch: list[Buffer] = []
    at, size = start, 0
    for offset, buffers in (*pieces, (end, [])):
        gap = offset - at - size
        assert gap >= 0, "extents overlap"
        for buffer in _cut([bytes(gap), *buffers], limit):
            batch.append(buffer)
            size += len(buffer)
            if size >= limit or len(batch) == MAX_BUFFERS:
                yield at, batch, size
                batch, at, size = [], at + size, 0
    if batch:
        yield at, batch, size


def _cut(buffers: Sequence[Buffer], limit: int) -> Iterator[Buffer]:
    for buffer in buffers:
        if len(buffer) <= limit:
            yield buffer
            continue
        view = memoryview(buffer)
        for lo in range(0, len(view), limit):
            yield view[lo : lo + limit]


def _fields(
    columns: Mapping[str, Payload], offsets: Mapping[str, int], packed: Collection[str]
) -> dict[str, Field]:
    fields, slot = {}, 0
    for name, column in columns.items():
        codec = CODEC if name in packed else ""
        at, size = offsets[name], column.nbytes
        fields[name] = Field(column.dtype, column.shape, at, size, slot, codec)
        slot += 0 if codec else -(-size // BLOCK)
    return fields


def _user_block_size(
    columns: Mapping[str, Payload], attributes: Mapping[str, Attribute], packed: Collection[str]
) -> int:
    """Returns the smallest legal size that holds the table, for any offsets."""
    widest = _fields(columns, dict.fromkeys(columns, 1 << 62), packed)
    num_crcs = sum(-(-column.nbytes // BLOCK) for column in columns.values())
    need = HEADER.size + len(_table(widest, attributes)) + 4 * num_crcs
    return max(MIN_USER_BLOCK, 1 << (need - 1).bit_length())


def _table(fields: Mapping[str, Field], attributes: Mapping[str, Attribute]) -> bytes:
    described = {
        name: {key: value for key, value in field._asdict().items() if key != "codec" or value}
        for name, field in fields.items()
    }
    table = {"fields": described, "attributes": dict(attributes)}
    return json.dumps(table, separators=(",", ":"), allow_nan=False).encode()


def _head(
    fields: Mapping[str, Field],
    attributes: Mapping[str, Attribute],
    crcs: npt.NDArray[np.uint32],
    user_block: int,
    length: int,
) -> bytes:
    table = _table(fields, attributes)
    body = table + crcs.tobytes()
    version, rows = int(attributes["rl_shard_format"]), int(attributes["n_samples"])
    uuid = bytes.fromhex(str(attributes["shard_uuid"]))
    parts = (MAGIC, version, user_block, length, rows, uuid, len(table), len(crcs), checksum(body))
    header = HEADER.pack(*parts, 0)[:-4]
    head = header + struct.pack("<I", checksum(header)) + body
    assert len(head) <= user_block
    return head.ljust(user_block, b"\0")
