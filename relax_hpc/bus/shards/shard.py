"""Reads a shard: an HDF5 file whose user block has offsets and checksums.

HDF5 leaves 2^k bytes before its superblock to the application. There we repeat the place of every
dataset and a CRC32C of every MiB. So reading is one open, one header read and one read per column,
without libhdf5, locks or look-ups, and no byte reaches a tensor unverified. The user block is
written last: a torn file has no magic. Shards stay open between reads. docs/reference/bus.md has
the tables.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from relax_hpc.bus.durable import PAGE, close_flushed, pread_into
from relax_hpc.bus.shards import encode, hdf5, media
from relax_hpc.bus.shards.hdf5 import Attribute
from relax_hpc.bus.shards.shard_format import (
    BLOCK,
    CODEC,
    FORMAT,
    HEADER,
    MAGIC,
    MEDIA_AXES,
    NAMES_OF_PARTS,
    ROW_OFFSETS,
    Field,
    ShardInfo,
    fields_of,
)
from relax_hpc.errors import BusError, DamagedError
from relax_hpc.runtime.files.records import checksum
from relax_hpc.runtime.files.storage import DAMAGE_S, patiently
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import COLUMNS, MEDIUM_AXES, OFFSETS, Array, Columns

HUGE_PAGE = 2 << 20
HEAD_READ = 1 << 17  # the header and, up to about 1,000 rows, all that is not long

T = TypeVar("T")
GONE = (errno.ENOENT, errno.ESTALE, errno.EIO)


class Memory:
    """Hands out room for columns: fresh memory costs about as much as the copy into it.

    With `reuse`, `reset` makes it hand out the same room again. It grows to the most ever taken
    between two resets. After a reset, arrays taken before are overwritten: callers must be done
    with them.
    """

    def __init__(self, *, reuse: bool = True) -> None:
        self._reuse = reuse
        self._room = np.empty(0, np.uint8)
        self._taken = 0

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Returns [size] uninitialised bytes; large ones begin on a page, as columns do in a
        file."""
        start = self._taken
        self._taken += -(-size // PAGE) * PAGE
        if self._reuse and self._taken <= len(self._room):
            return self._room[start : start + size]
        return _allocate(size) if size >= 16 * PAGE else np.empty(size, np.uint8)

    def reset(self) -> None:
        """Frees all memory taken so far for reuse."""
        if self._reuse and self._taken > len(self._room):
            self._room = _allocate(self._taken)
        self._taken = 0


def _allocate(size: int) -> npt.NDArray[np.uint8]:
    """Returns memory that begins on a page: the kernel copies that 1.4 times as fast.

    Large ones begin on a huge page, so that no small pages are needed at their start.
    """
    page = HUGE_PAGE if size >= 2 * HUGE_PAGE else PAGE
    room = np.empty(size + page, np.uint8)
    start = -room.ctypes.data % page
    return room[start : start + size]


class Shard:
    """An open shard.

    Args:
        verify: whether every block read is compared with its checksum.
        memory: for the columns; fresh arrays by default.

    Raises:
        DamagedError: missing, not a shard, torn or corrupt; the message says which.
        BusError: of a newer format, or not readable.
    """

    def __init__(self, path: Path, *, verify: bool = True, memory: Memory | None = None) -> None:
        self.path = path
        self._verify = verify
        self._memory = Memory(reuse=False) if memory is None else memory
        self._fd = -1
        try:
            self._patiently(lambda _: None)
        except OSError as error:
            kind = DamagedError if error.errno in GONE else BusError
            raise kind(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self._read_head()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_flushed(fd)

    @property
    def info(self) -> ShardInfo:
        tokens = self._offsets(ROW_OFFSETS)[-1]
        return ShardInfo(self.uuid, self.length, self.rows, int(tokens))

    @property
    def part_names(self) -> list[str]:
        names: list[str] = json.loads(str(self.attributes.get(NAMES_OF_PARTS, "[]")))
        return names

    def read(self, name: str) -> Array:
        return self._items(name, 0, self._field(name).shape[0])

    def read_rows(self, name: str, lo: int, hi: int) -> Array:
        """Reads column `name` of the trajectories lo <= row < hi, contiguously.

        Media columns count in media instead; see `read_span`.
        """
        column = COLUMNS.get(name)
        if column is not None and column.axis not in ("row", "medium"):
            offsets = self._offsets(OFFSETS[column.axis])
            lo, hi = int(offsets[lo]), int(offsets[hi])
        return self._items(name, lo, hi)

    def read_span(self, lo: int, hi: int, columns: Collection[str] | None = None) -> Columns:
        """Reads the trajectories lo <= row < hi, as a shard of their own would hold them.

        Args:
            columns: columns to read, with their offsets; all by default. Of others no byte is read.

        Raises:
            BusError: damaged, or without a required column. Missing optional columns are left out.
        """
        span: Columns = {}
        axes = set()
        names = self._select_names(columns)
        for name in names:
            axis = COLUMNS[name].axis
            if axis not in (*MEDIA_AXES, "routed"):
                span[name] = self.read_rows(name, lo, hi)
                axes.add(axis)
        for axis in axes - {"row"}:
            offsets = self._offsets(OFFSETS[axis])[lo : hi + 1]
            span[OFFSETS[axis]] = offsets - offsets[0]
        if encode.COLUMN in names:
            span |= self._read_routed(lo, hi)
        if any(COLUMNS[name].axis in MEDIA_AXES for name in names):
            span |= self._media(lo, hi, names)
        return span

    def read_raw(self, name: str, lo: int, hi: int) -> Array:
        """Reads items lo <= i < hi of a column exactly, without checksums.

        For callers that know a digest of the items.
        """
        field = self._within(name, lo, hi)
        if field.codec or hi <= lo:
            return self._items(name, lo, hi)
        stride = math.prod(field.shape[1:]) * np.dtype(field.dtype).itemsize
        buffer = self._memory.take((hi - lo) * stride)
        self._fill(buffer.data, field.offset + lo * stride)
        return buffer.view(field.dtype).reshape(hi - lo, *field.shape[1:])

    def verify(self) -> None:
        """Reads everything once.

        Raises:
            BusError: a block does not match its checksum.
        """
        for name in self.fields:
            self.read(name)

    def _select_names(self, columns: Collection[str] | None) -> list[str]:
        if columns is None:
            return [name for name in self.fields if name in COLUMNS]
        optional = {n for n in columns if n in COLUMNS and not COLUMNS[n].required}
        return [self._check_name(n) for n in columns if n in self.fields or n not in optional]

    def _check_name(self, name: str) -> str:
        self._field(name)
        return name

    def _field(self, name: str) -> Field:
        try:
            return self.fields[name]
        except KeyError:
            held = ", ".join(self.fields)
            raise BusError(f"{self.path}: has no column {name}; it holds {held}") from None

    def _within(self, name: str, lo: int, hi: int) -> Field:
        field = self._field(name)
        if not 0 <= lo <= hi <= field.shape[0]:
            raise self.corrupt(f"items {lo} to {hi} of {field.shape[0]} of {name} are named")
        return field

    def _offsets(self, name: str) -> npt.NDArray[np.int64]:
        if name not in self._cached_offsets:
            # Kept as long as the shard is open, so not in memory that may be used again.
            self._cached_offsets[name] = self.read(name).astype(np.int64)
        return self._cached_offsets[name]

    def _read_routed(self, lo: int, hi: int) -> Columns:
        """Restores the prompt of the first group's rows if they share it with a row before the
        span."""
        offsets, tokens = self._offsets(OFFSETS["routed"]), self._offsets(ROW_OFFSETS)
        values = self.read_rows(encode.COLUMN, lo, hi)
        ends = offsets[lo : hi + 1] - offsets[lo]
        places = (self.read_rows(f"row/{name}", 0, hi) for name in ("sibling", "segment"))
        begins = encode.begins_group(*places)
        if lo < hi and not begins[lo]:
            alone = begins.index(True, lo) - lo if True in begins[lo:] else hi - lo
            first_row = lo - 1 - begins[lo - 1 :: -1].index(True)
            prompt_lens = self.read_rows("row/prompt_len", lo, lo + alone).tolist()
            first = int(offsets[first_row])
            size = int(self.read_rows("row/prompt_len", first_row, first_row + 1)[0])
            prompt = self._items(encode.COLUMN, first, first + size)
            lengths = np.diff(tokens[lo : lo + alone + 1])
            values, ends = encode.complete(values, ends, prompt, prompt_lens, lengths)
        return {encode.COLUMN: values, OFFSETS["routed"]: ends}

    def _media(self, lo: int, hi: int, names: Collection[str]) -> Columns:
        """Reads the media of the rows, renumbered; each run of neighbouring media is one read."""
        bounds = self._offsets(OFFSETS["media_ref"])[lo : hi + 1]
        shown = self._items(media.REFS, int(bounds[0]), int(bounds[-1]))
        wanted = np.unique(shown)
        if media.BYTES in names:  # of a medium whose bytes another one has, that one comes along
            owners = media.owners(self.read(media.DIGEST), self._offsets(OFFSETS["media_byte"]))
            wanted = np.unique(np.concatenate([wanted, owners[wanted]]))
        refs = np.searchsorted(wanted, shown)
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1) if len(wanted) else []
        span: Columns = {
            media.REFS: refs.astype(np.int32),
            OFFSETS["media_ref"]: bounds - bounds[0],
        }
        for name in names:
            axis = COLUMNS[name].axis
            if axis == "medium":
                span[name] = self.read(name)[wanted]
            elif axis in MEDIUM_AXES:
                ends = self._offsets(OFFSETS[axis])
                parts = [
                    self._items(name, int(ends[run[0]]), int(ends[run[-1] + 1])) for run in runs
                ]
                span[name] = (
                    parts[0] if len(parts) == 1 else _concatenate(parts, COLUMNS[name].dtype)
                )
                sizes = np.diff(ends)[wanted]
                span[OFFSETS[axis]] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return span

    def _items(self, name: str, lo: int, hi: int) -> Array:
        field = self._within(name, lo, hi)
        if field.codec:
            return self._read_uncompressed(name, lo, hi)
        stride = math.prod(field.shape[1:]) * np.dtype(field.dtype).itemsize
        values = self._bytes(name, lo * stride, hi * stride).view(field.dtype)
        return values.reshape(hi - lo, *field.shape[1:])

    def _read_uncompressed(self, name: str, lo: int, hi: int) -> Array:
        field = self.fields[name]
        if field.codec != CODEC:
            raise BusError(f"{self.path}: {name} is compressed by {field.codec}, not {CODEC}")
        try:
            return hdf5.read_compressed(self._pread, self.length, name, field, slice(lo, hi))
        except OSError as error:
            raise self.corrupt(f"{name} cannot be uncompressed ({error})") from error

    def _bytes(self, name: str, lo: int, hi: int) -> npt.NDArray[np.uint8]:
        if hi <= lo:
            return np.empty(0, np.uint8)
        buffer = self._memory.take(hi - lo)
        if self._verify:
            self._fill_verified(name, lo, buffer.data)
        else:
            self._fill(buffer.data, self.fields[name].offset + lo)
        return buffer

    def _fill(self, out: memoryview, at: int) -> None:
        if at + len(out) <= len(self._head):
            out[:] = self._head[at : at + len(out)]
        elif self._pread(out, at) < len(out):
            raise self._torn()

    def _pread(self, out: memoryview, at: int) -> int:
        try:
            return self._patiently(lambda fd: pread_into(fd, out, at))
        except OSError as error:
            raise DamagedError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _patiently(self, call: Callable[[int], T]) -> T:
        """Calls with the descriptor; after an error reopens the shard and calls again."""

        def anew() -> T:
            try:
                if self._fd < 0:
                    self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                return call(self._fd)
            except OSError:
                self.close()
                raise

        return patiently(self.path, anew, damage_s=DAMAGE_S)

    def _fill_verified(self, name: str, lo: int, out: memoryview) -> None:
        """Reads and checks block by block: in the cache, a check costs a tenth of the read.

        Blocks at the edges are read whole, but only the requested bytes are kept.
        """
        field, hi = self.fields[name], lo + len(out)
        for at in range(lo // BLOCK * BLOCK, hi, BLOCK):
            end = min(at + BLOCK, field.nbytes)
            inside = lo <= at and end <= hi
            block = out[at - lo : end - lo] if inside else self._edge[: end - at]
            self._fill(block, field.offset + at)
            self._check_block(name, at, block)
            if not inside:
                first, last = max(at, lo), min(end, hi)
                out[first - lo : last - lo] = block[first - at : last - at]

    @cached_property
    def _edge(self) -> memoryview:
        return memoryview(bytearray(BLOCK))

    def _check_block(self, name: str, at: int, block: memoryview) -> None:
        slot = self.fields[name].slot + at // BLOCK
        if checksum(block) != self._crcs[slot]:
            raise self.corrupt(f"block {slot} ({name}) does not match its checksum")

    def _read_head(self) -> None:
        head = bytearray(HEAD_READ)
        got = self._pread(memoryview(head), 0)
        del head[got:]
        if not head.startswith(MAGIC):
            raise self._no_magic(head)
        if len(head) < HEADER.size:
            raise self._torn()
        _, version, _, length, rows, uuid, table_bytes, num_crcs, body_crc, header_crc = (
            HEADER.unpack_from(head)
        )
        if checksum(head[: HEADER.size - 4]) != header_crc:
            raise self.corrupt("the header does not match its checksum")
        if version > FORMAT:
            raise BusError(
                f"{self.path}: is shard format {version}, this relax-hpc reads up to {FORMAT}; "
                "use the version that wrote it, or a newer one"
            )
        end = HEADER.size + table_bytes + 4 * num_crcs
        # A size from the open descriptor: no name is looked up.
        if not end <= length <= self._patiently(os.fstat).st_size:
            raise self._torn()
        body = head[HEADER.size : end]
        if len(head) < end:
            body = bytearray(end - HEADER.size)
            if self._pread(memoryview(body), HEADER.size) < len(body):
                raise self._torn()
        if checksum(body) != body_crc:
            raise self.corrupt("the field table does not match its checksum")
        self.length, self.rows, self.uuid = int(length), int(rows), bytes(uuid).hex()
        self._crcs = np.frombuffer(bytes(body), "<u4", num_crcs, table_bytes)
        self._cached_offsets: dict[str, npt.NDArray[np.int64]] = {}
        self._read_table(body[:table_bytes])
        self._head = memoryview(head)

    def _read_table(self, text: bytes | bytearray) -> None:
        try:
            table: dict[str, Any] = json.loads(text)
            self.attributes: dict[str, Attribute] = dict(table["attributes"])
            self.fields = fields_of(table["fields"], self.length, self.rows, len(self._crcs))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self.corrupt(f"the field table cannot be ({error})") from error

    def _no_magic(self, head: bytearray) -> DamagedError:
        if not head:
            return DamagedError(
                f"{self.path}: is empty: its writer died or the disk was full; delete it"
            )
        if not any(head[: HEADER.size]) or MAGIC.startswith(head):
            return self._torn()
        return DamagedError(
            f"{self.path}: is not a shard (it starts with {bytes(head[:8])!r}); "
            "shards lie in <run>/bus/p/<producer>/f<fence>/"
        )

    def _torn(self) -> DamagedError:
        return DamagedError(
            f"{self.path}: is torn: shorter than its header says, or its writer died; if no commit "
            "record names it, delete it; if one does, the file system lost data: restore the file"
        )

    def corrupt(self, what: str) -> DamagedError:
        return DamagedError(
            f"{self.path}: is corrupt: {what}; it changed after it was committed: restore the "
            "file, or resume from a checkpoint behind it"
        )


def _concatenate(parts: Sequence[Array], dtype: str) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


MAX_OPEN = 256
"""Well below the usual limit of 1,024 descriptors per process."""


class OpenShards:
    """The open shards of one process, the least recently used closed first.

    Args:
        verify: whether every byte is checked when it is read.
    """

    def __init__(self, paths: BusPaths, *, verify: bool = True) -> None:
        self._paths, self._verify = paths, verify
        self._open: dict[str, Shard] = {}

    def get(self, owner: str, fence: int, seq: int, uuid: str) -> Shard:
        """Returns the shard, valid until the next call.

        Raises:
            DamagedError: it is missing, damaged or another one.
        """
        shard = self._open.pop(uuid, None) or self._look_up(owner, fence, seq, uuid)
        self._open[uuid] = shard
        if len(self._open) > MAX_OPEN:
            self.close([next(iter(self._open))])
        return shard

    def close(self, uuids: Iterable[str] | None = None) -> None:
        for uuid in list(self._open if uuids is None else uuids):
            if shard := self._open.pop(uuid, None):
                shard.close()

    def _look_up(self, owner: str, fence: int, seq: int, uuid: str) -> Shard:
        path = self._paths.shard(owner, fence, seq)
        shard = Shard(path, verify=self._verify)
        if shard.uuid != uuid:
            shard.close()
            raise DamagedError(
                f"{path}: is not the shard that record {uuid} committed; restore the file"
            )
        return shard
