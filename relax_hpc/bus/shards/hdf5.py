"""Lays out a shard's HDF5 metadata with libhdf5, in memory, without the payload.

Opening a path through libhdf5 costs stats, a lock and many small writes. Here it only builds its
superblock and object headers, through h5py's file-object driver, and returns where each dataset's
bytes belong. `bus.shards.shard_write` writes both with plain system calls. Only compressed columns
are written and read by libhdf5.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import h5py
import hdf5plugin  # noqa: F401 - registers the filter with libhdf5
import numpy as np
from h5py import h5d, h5g, h5p, h5s, h5t, h5z

from relax_hpc.bus.durable import PAGE
from relax_hpc.bus.shards.shard_format import Field, num_bytes
from relax_hpc.schema import Array

Attribute = str | int | float
Pread = Callable[[memoryview, int], int]
"""Fills memory from an offset of a file; returns bytes read, fewer only at its end."""
PAGES_FROM = 1 << 20
"""Objects of at least this size begin on a page, since the kernel copies them faster; small ones
would leave mostly gaps."""
CHUNK_BYTES = 1 << 20
ZSTD = 32015
"""HDF5's registered number of the filter."""
_FILTERS = (h5z.FILTER_SHUFFLE, ZSTD, h5z.FILTER_FLETCHER32)
# Level 1 with shuffle: 0.44 of the size of routed experts at 0.8 GB/s; deflate needs nine times
# the time for as much, higher levels and bitshuffle gain nothing.
_ZSTD_LEVEL = 1


class Dataset(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    compressed: Array | None = None
    """Values, if libhdf5 compresses them; else only the place is laid out."""


class Skeleton(NamedTuple):
    """An HDF5 file without its payload."""

    extents: list[tuple[int, bytes]]
    """(absolute offset, bytes) of metadata and compressed chunks, rising, not overlapping."""
    offsets: dict[str, int]
    """Dataset -> absolute offset of its bytes; 0 if it is empty or compressed."""
    length: int


class _SparseFile:
    """A seekable file that keeps only the extents written to it; holes read as zeros."""

    def __init__(self) -> None:
        self.extents: dict[int, bytes] = {}
        self.length = 0
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def write(self, data: bytes | memoryview) -> int:
        lo, hi = self._at, self._at + len(data)
        overlapped = (
            [a for a, old in self.extents.items() if a < hi and a + len(old) > lo]
            if lo < self.length
            else []
        )
        for start in overlapped:  # the last writer wins; what sticks out on either side stays
            old = self.extents.pop(start)
            if start < lo:
                self.extents[start] = old[: lo - start]
            if start + len(old) > hi:
                self.extents[hi] = old[hi - start :]
        self.extents[lo] = bytes(data)
        self._at, self.length = hi, max(self.length, hi)
        return len(data)

    def readinto(self, out: memoryview) -> int:
        lo, hi = self._at, self._at + len(out)
        out[:] = bytes(len(out))
        for start, data in self.extents.items():
            a, b = max(start, lo), min(start + len(data), hi)
            if a < b:
                out[a - lo : b - lo] = data[a - start : b - start]
        self._at = hi
        return len(out)

    def read(self, size: int = -1) -> bytes:
        out = bytearray(self.length - self._at if size < 0 else size)
        self.readinto(memoryview(out))
        return bytes(out)

    def truncate(self, size: int | None = None) -> int:
        self.length = self._at if size is None else size
        return self.length

    def flush(self) -> None:
        """Does nothing: nothing is buffered."""


def lay_out(
    datasets: Sequence[Dataset], attributes: Mapping[str, Attribute], *, user_block: int
) -> Skeleton:
    """Builds the metadata of an HDF5 file with contiguous, early-allocated datasets.

    Args:
        datasets: in the order their bytes should lie in the file.
        user_block: bytes kept free in front of the superblock; a power of two, at least 512.
    """
    sparse = _SparseFile()
    # Fixed superblock version 3: the same bytes from every libhdf5, readable since HDF5 1.10.
    with h5py.File(
        sparse,
        "w",
        libver=("v110", "v110"),
        userblock_size=user_block,
        alignment_threshold=PAGES_FROM,
        alignment_interval=PAGE,
    ) as file:
        for group in dict.fromkeys(d.name.split("/")[0] for d in datasets):
            h5g.create(file.id, group.encode())
        contiguous = _contiguous()
        offsets = {d.name: _create(file, d, contiguous) for d in datasets}
        for key, value in attributes.items():
            file.attrs[key] = value
    ends = [offsets[d.name] + num_bytes(d.dtype, d.shape) for d in datasets if d.compressed is None]
    return Skeleton(sorted(sparse.extents.items()), offsets, max(sparse.length, *ends, 0))


def read_compressed(pread: Pread, length: int, name: str, field: Field, items: slice) -> Array:
    """Reads items of a compressed dataset.

    Args:
        pread: fills memory from an offset of the open shard; returns bytes read.

    Raises:
        OSError: metadata or a chunk is damaged, or it is not compressed as here.
    """
    try:
        with h5py.File(_OpenFile(pread, length), "r") as file:
            return cast(Array, _open_compressed(file, name, field)[items])
    except (KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise OSError(f"libhdf5: {error}") from error


def _open_compressed(file: h5py.File, name: str, field: Field) -> h5py.Dataset:
    """Opens the dataset, if `_make_chunk_options` could have made it.

    HDF5 would follow links, virtual and external datasets to any file the reader can open.
    """
    dataset = file
    for entry in name.split("/"):
        if not isinstance(dataset.get(entry, getlink=True), h5py.HardLink):
            raise ValueError(f"{entry} is a link")
        dataset = dataset[entry]
    plist = dataset.id.get_create_plist()
    filters = tuple(plist.get_filter(n)[0] for n in range(plist.get_nfilters()))
    if (plist.get_layout(), filters) != (h5d.CHUNKED, _FILTERS):
        raise ValueError(f"layout {plist.get_layout()}, filters {filters}")
    if (dataset.dtype, dataset.shape) != (np.dtype(field.dtype), field.shape):
        raise ValueError(f"{name} is {dataset.dtype} {dataset.shape}")
    return dataset


class _OpenFile:
    """A read-only file object over a file that is open already."""

    def __init__(self, pread: Pread, length: int) -> None:
        self._pread, self._length, self._at = pread, length, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, out: memoryview) -> int:
        got = self._pread(out, self._at)
        self._at += got
        return got

    def read(self, size: int = -1) -> bytes:
        data = bytearray(self._length - self._at if size < 0 else size)
        return bytes(data[: self.readinto(memoryview(data))])

    def flush(self) -> None:
        """Does nothing: nothing is buffered."""


def _create(file: h5py.File, dataset: Dataset, contiguous: h5p.PropDCID) -> int:
    plist = contiguous if dataset.compressed is None else _make_chunk_options(dataset)
    dtype = h5t.py_create(np.dtype(dataset.dtype), logical=True)
    created = h5d.create(
        file.id, dataset.name.encode(), dtype, h5s.create_simple(dataset.shape), plist
    )
    if dataset.compressed is not None:
        created.write(h5s.ALL, h5s.ALL, dataset.compressed)
        return 0
    return int(created.get_offset()) if num_bytes(dataset.dtype, dataset.shape) else 0


def _contiguous() -> h5p.PropDCID:
    plist = _plist()
    plist.set_layout(h5d.CONTIGUOUS)
    plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)  # the offset must be known before any data is
    return plist


def _make_chunk_options(dataset: Dataset) -> h5p.PropDCID:
    plist = _plist()
    items = max(dataset.shape[0], 1)
    stride = max(num_bytes(dataset.dtype, dataset.shape) // items, 1)
    plist.set_chunk((min(max(CHUNK_BYTES // stride, 1), items), *dataset.shape[1:]))
    plist.set_shuffle()
    plist.set_filter(ZSTD, h5z.FLAG_MANDATORY, (_ZSTD_LEVEL,))
    plist.set_fletcher32()
    return plist


def _plist() -> h5p.PropDCID:
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_fill_time(h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)
    return plist
