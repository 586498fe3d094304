"""Reading a shard: an HDF5 file whose user block says where the bytes are and what they sum to.

HDF5 leaves 2^k bytes in front of its superblock to the application. There we repeat the place of
every dataset and a CRC32C of every MiB, so reading is one open, one header read and one read per
column, without libhdf5, locks or look-ups, and no byte reaches a tensor unverified. The user block
is written last: a torn file has no magic. docs/bus.md has the tables.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from relax_hpc.bus.durable import close_flushed, pread_into
from relax_hpc.bus.shards import hdf5, media, routed
from relax_hpc.bus.shards.hdf5 import Attribute
from relax_hpc.bus.shards.memory import Memory
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
from relax_hpc.records import checksum
from relax_hpc.schema import COLUMNS, MEDIUM_AXES, OFFSETS, Array, Columns
from relax_hpc.storage import DAMAGE_S, patiently

HEAD_READ = 1 << 17  # the header and, up to about 1,000 rows, all that is not long

T = TypeVar("T")
GONE = (errno.ENOENT, errno.ESTALE, errno.EIO)


class Shard:
    """An open shard.

    Args:
        verify: compare every block read with its checksum.
        memory: where the columns go; fresh arrays if there is none.

    Raises:
        DamagedError: missing, not a shard, torn or corrupt; the message says which.
        BusError: of a newer format, or it may not be read.
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
        """Names of the columns of `row/score_parts`."""
        names: list[str] = json.loads(str(self.attributes.get(NAMES_OF_PARTS, "[]")))
        return names

    def read(self, name: str) -> Array:
        """The whole column `name`, or the offsets of an axis."""
        return self._items(name, 0, self._field(name).shape[0])

    def read_rows(self, name: str, lo: int, hi: int) -> Array:
        """Column `name` of the trajectories lo <= row < hi; one contiguous read.

        Media columns count in media instead; see `read_span`.
        """
        column = COLUMNS.get(name)
        if column is not None and column.axis not in ("row", "medium"):
            offsets = self._offsets(OFFSETS[column.axis])
            lo, hi = int(offsets[lo]), int(offsets[hi])
        return self._items(name, lo, hi)

    def read_span(self, lo: int, hi: int, columns: Collection[str] | None = None) -> Columns:
        """The trajectories lo <= row < hi, as a shard of their own would hold them.

        Args:
            columns: what to read, with the offsets that go with it; everything if not given. Of
                what is not named no byte is read.

        Raises:
            BusError: damaged, or a column that is always there is not. Optional columns that are
                asked for and not there are left out.
        """
        span: Columns = {}
        axes = set()
        names = self._named(columns)
        for name in names:
            axis = COLUMNS[name].axis
            if axis not in (*MEDIA_AXES, "routed"):
                span[name] = self.read_rows(name, lo, hi)
                axes.add(axis)
        for axis in axes - {"row"}:
            offsets = self._offsets(OFFSETS[axis])[lo : hi + 1]
            span[OFFSETS[axis]] = offsets - offsets[0]
        if routed.COLUMN in names:
            span |= self._routed(lo, hi)
        if any(COLUMNS[name].axis in MEDIA_AXES for name in names):
            span |= self._media(lo, hi, names)
        return span

    def read_raw(self, name: str, lo: int, hi: int) -> Array:
        """Items lo <= i < hi of a column, without a look at checksums and so not a byte more.

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

    def _named(self, columns: Collection[str] | None) -> list[str]:
        if columns is None:
            return [name for name in self.fields if name in COLUMNS]
        optional = {n for n in columns if n in COLUMNS and not COLUMNS[n].required}
        return [self._known(n) for n in columns if n in self.fields or n not in optional]

    def _known(self, name: str) -> str:
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

    def _routed(self, lo: int, hi: int) -> Columns:
        """Rows of the first group get back the prompt they share with a row before the span."""
        offsets, tokens = self._offsets(OFFSETS["routed"]), self._offsets(ROW_OFFSETS)
        values = self.read_rows(routed.COLUMN, lo, hi)
        ends = offsets[lo : hi + 1] - offsets[lo]
        places = (self.read_rows(f"row/{name}", 0, hi) for name in ("sibling", "segment"))
        begins = routed.begins_group(*places)
        if lo < hi and not begins[lo]:
            alone = begins.index(True, lo) - lo if True in begins[lo:] else hi - lo
            first_row = lo - 1 - begins[lo - 1 :: -1].index(True)
            prompt_lens = self.read_rows("row/prompt_len", lo, lo + alone).tolist()
            first = int(offsets[first_row])
            size = int(self.read_rows("row/prompt_len", first_row, first_row + 1)[0])
            prompt = self._items(routed.COLUMN, first, first + size)
            lengths = np.diff(tokens[lo : lo + alone + 1])
            values, ends = routed.complete(values, ends, prompt, prompt_lens, lengths)
        return {routed.COLUMN: values, OFFSETS["routed"]: ends}

    def _media(self, lo: int, hi: int, names: Collection[str]) -> Columns:
        """Reads the media of the rows, numbered anew; each run of neighbouring media is one
        read."""
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
                span[name] = parts[0] if len(parts) == 1 else _joined(parts, COLUMNS[name].dtype)
                sizes = np.diff(ends)[wanted]
                span[OFFSETS[axis]] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return span

    def _items(self, name: str, lo: int, hi: int) -> Array:
        """Items lo <= i < hi of a dataset's first dimension."""
        field = self._within(name, lo, hi)
        if field.codec:
            return self._uncompressed(name, lo, hi)
        stride = math.prod(field.shape[1:]) * np.dtype(field.dtype).itemsize
        values = self._bytes(name, lo * stride, hi * stride).view(field.dtype)
        return values.reshape(hi - lo, *field.shape[1:])

    def _uncompressed(self, name: str, lo: int, hi: int) -> Array:
        field = self.fields[name]
        if field.codec != CODEC:
            raise BusError(f"{self.path}: {name} is compressed by {field.codec}, not {CODEC}")
        try:
            return hdf5.read_compressed(self._pread, self.length, name, field, slice(lo, hi))
        except OSError as error:
            raise self.corrupt(f"{name} cannot be uncompressed ({error})") from error

    def _bytes(self, name: str, lo: int, hi: int) -> npt.NDArray[np.uint8]:
        """Bytes lo <= i < hi of a dataset."""
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
        """Calls with the descriptor, after an error with another one of the same shard."""

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
        """Checks every block while it is in the cache, where that costs a tenth of the reading.

        Of the blocks at the edges, which are read whole, only what was asked for is kept.
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


def _joined(parts: Sequence[Array], dtype: str) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
