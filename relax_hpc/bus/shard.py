"""Reading a shard: an HDF5 file whose user block says where the bytes are and what they sum to.

HDF5 leaves 2^k bytes in front of its superblock to the application. There we repeat the place of
every dataset and a CRC32C of every MiB, so reading is one open, one header read and one read per
column, without libhdf5, locks or look-ups, and no byte reaches a tensor unverified. The user block
is written last: a torn file has no magic. docs/bus.md has the tables.
"""

import json
import os
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from relax_hpc.bus.durable import checksum, pread_into
from relax_hpc.bus.hdf5 import Attribute
from relax_hpc.bus.shard_format import BLOCK, FORMAT, HEADER, MAGIC, ROW_OFFSETS, Field, ShardInfo
from relax_hpc.errors import BusError
from relax_hpc.schema import COLUMNS, OFFSETS, Array, Columns

HEAD_READ = 1 << 16


class Shard:
    """An open shard.

    Raises:
        BusError: not a shard, torn, damaged or of a newer format; the message says which.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path = path
        self._verify = verify
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise BusError(f"{path}: cannot be opened: {error.strerror}") from error
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
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    @property
    def info(self) -> ShardInfo:
        tokens = self.read(ROW_OFFSETS)[-1]
        return ShardInfo(self.uuid, self.length, self.rows, int(tokens))

    def read(self, name: str) -> Array:
        """The whole column `name`, or the offsets of an axis."""
        field = self._field(name)
        return self._bytes(name, 0, field.nbytes).view(field.dtype).reshape(field.shape)

    def read_rows(self, name: str, lo: int, hi: int) -> Array:
        """Column `name` of the trajectories lo <= row < hi; one contiguous read."""
        offsets = self._offsets_of(name)
        if offsets is not None:
            lo, hi = int(offsets[lo]), int(offsets[hi])
        field = self._field(name)
        stride = int(np.prod(field.shape[1:], dtype=np.int64)) * np.dtype(field.dtype).itemsize
        values = self._bytes(name, lo * stride, hi * stride).view(field.dtype)
        return values.reshape(hi - lo, *field.shape[1:])

    def read_span(self, lo: int, hi: int) -> Columns:
        """Every column of the trajectories lo <= row < hi, as a shard of their own would hold it.

        Media are shared between rows and are not part of it.
        """
        span: Columns = {}
        for name in self.fields:
            if name in COLUMNS and COLUMNS[name].axis not in ("medium", "media_byte"):
                span[name] = self.read_rows(name, lo, hi)
        for axis in ("token", "run", "turn", "media_ref"):
            if OFFSETS[axis] in self.fields:
                offsets = self._offsets(OFFSETS[axis])[lo : hi + 1]
                span[OFFSETS[axis]] = offsets - offsets[0]
        return span

    def verify(self) -> None:
        """Reads everything once.

        Raises:
            BusError: a block does not match its checksum.
        """
        for name in self.fields:
            self.read(name)

    def _field(self, name: str) -> Field:
        try:
            return self.fields[name]
        except KeyError:
            held = ", ".join(self.fields)
            raise BusError(f"{self.path}: has no column {name}; it holds {held}") from None

    def _offsets_of(self, name: str) -> npt.NDArray[np.int64] | None:
        column = COLUMNS.get(name)
        if column is None or column.axis in ("row", "medium"):
            return None
        return self._offsets(OFFSETS[column.axis])

    def _offsets(self, name: str) -> npt.NDArray[np.int64]:
        if name not in self._cached_offsets:
            self._cached_offsets[name] = self.read(name).astype(np.int64, copy=False)
        return self._cached_offsets[name]

    def _bytes(self, name: str, lo: int, hi: int) -> npt.NDArray[np.uint8]:
        """Bytes lo <= i < hi of a dataset; verifying reads the whole blocks around them."""
        field = self.fields[name]
        first, last = lo, hi
        if self._verify:
            first = lo // BLOCK * BLOCK
            last = min(-(-hi // BLOCK) * BLOCK, field.nbytes)
        buffer = np.empty(max(last - first, 0), np.uint8)
        step = BLOCK if self._verify else max(last - first, 1)
        for at in range(first, last, step):
            block = buffer.data[at - first : at - first + step]
            if pread_into(self._fd, block, field.offset + at) < len(block):
                raise self._torn()
            slot = field.slot + at // BLOCK
            if self._verify and checksum(block) != self._crcs[slot]:
                raise self._corrupt(f"block {slot} ({name}) does not match its checksum")
        return buffer[lo - first : hi - first]

    def _read_head(self) -> None:
        head = bytearray(HEAD_READ)
        head = head[: pread_into(self._fd, memoryview(head), 0)]
        if not head.startswith(MAGIC):
            raise self._no_magic(head)
        if len(head) < HEADER.size:
            raise self._torn()
        _, version, _, length, rows, uuid, table_bytes, num_crcs, body_crc, header_crc = (
            HEADER.unpack_from(head)
        )
        if checksum(head[: HEADER.size - 4]) != header_crc:
            raise self._corrupt("the header does not match its checksum")
        if version > FORMAT:
            raise BusError(
                f"{self.path}: is shard format {version}, this relax-hpc reads up to {FORMAT}; "
                "use the version that wrote it, or a newer one"
            )
        body = bytearray(table_bytes + 4 * num_crcs)
        got = pread_into(self._fd, memoryview(body), HEADER.size)
        # A size from the open descriptor: no name is looked up.
        if got < len(body) or os.fstat(self._fd).st_size < length:
            raise self._torn()
        if checksum(body) != body_crc:
            raise self._corrupt("the field table does not match its checksum")
        self.length, self.rows, self.uuid = int(length), int(rows), bytes(uuid).hex()
        self._crcs = np.frombuffer(bytes(body), "<u4", num_crcs, table_bytes)
        self._read_table(json.loads(body[:table_bytes]))

    def _read_table(self, table: dict[str, Any]) -> None:
        self.attributes: dict[str, Attribute] = table["attributes"]
        self.fields = {
            name: Field(**{**field, "shape": tuple(field["shape"])})
            for name, field in table["fields"].items()
        }
        self._cached_offsets: dict[str, npt.NDArray[np.int64]] = {}

    def _no_magic(self, head: bytearray) -> BusError:
        if not head:
            return BusError(
                f"{self.path}: is empty: its writer died or the disk was full; delete it"
            )
        if not any(head[: HEADER.size]):
            return self._torn()
        return BusError(
            f"{self.path}: is not a shard (it starts with {bytes(head[:8])!r}); "
            "shards lie in <run>/bus/p/<producer>/e<epoch>/"
        )

    def _torn(self) -> BusError:
        return BusError(
            f"{self.path}: is torn: shorter than its header says, or its writer died; if no commit "
            "record names it, delete it; if one does, the file system lost data: restore the file"
        )

    def _corrupt(self, what: str) -> BusError:
        return BusError(
            f"{self.path}: is corrupt: {what}; it changed after it was committed: restore the "
            "file, or resume from a checkpoint behind it"
        )
