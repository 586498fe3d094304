"""Writes checkpoints in torch's distributed format, which Megatron reads: a part by each rank.

`__<rank>_0.distcp` holds tensors end to end, each as torch.save writes it. Behind them lie a table
that says what they are, with a CRC32C of each, and a footer that says where the table begins. A
part gets its name when all of it is on disk, which is how rank 0 knows; it writes what names the
parts. Ranks need not talk to each other, so all of this can happen beside training.
"""

import io
import json
import math
import os
import pickle
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from relax_hpc.engines.megatron.checkpoint.boxes import Box
from relax_hpc.engines.megatron.checkpoint.new_file import NewFile, opened
from relax_hpc.errors import CheckpointError, PeerTimeoutError
from relax_hpc.records import checksum
from relax_hpc.storage import DAMAGE_S, is_short, move, names, patiently

FOOTER = struct.Struct("<8sQI4x")
"""MAGIC, bytes of the table, its checksum; the last bytes of a part."""
MAGIC = b"RLXCKPT1"
MANIFEST = "manifest.json"
NUM_THREADS = 4
_GATHERED_BYTES = 1 << 16  # shorter pieces are written with what follows
_POLL_S = 0.05
_ROOM_S = 10.0
"""Interval of looks whether there is room again."""


class Entry(NamedTuple):
    """One line of the table of a part."""

    key: str
    offset: list[int] | None
    """None: not a tensor."""
    shape: list[int]
    whole: list[int]
    dtype: str
    at: int
    """First byte in the file."""
    num_bytes: int
    checksum: int


def part_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def write_part(folder: Path, rank: int, boxes: Iterable[Box], objects: Mapping[str, bytes]) -> int:
    """Writes what one rank has, so that it survives a power cut.

    Args:
        boxes: taken one at a time by several threads, and forgotten once they are written.
        objects: what is not a tensor, serialised, by key.

    Returns:
        Bytes of the file.

    Raises:
        CheckpointError: naming the file and what the system said.
    """
    final = folder / part_name(rank)
    draft = final.with_name(f".{final.name}.tmp")
    try:
        with opened(draft) as file:
            part = _Part(file)
            part.add_boxes(iter(boxes))
            for key, content in objects.items():
                part.add(key, content)
            num_bytes = part.finish()
            file.sync()
        move(draft, final)
    except OSError as error:
        raise CheckpointError(f"{final}: cannot be written: {error.strerror}") from error
    return num_bytes


def write_names(
    folder: Path,
    num_ranks: int,
    common: Mapping[str, Any],
    *,
    timeout_s: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> int:
    """Waits for all parts and writes what names them: then the checkpoint can be read.

    Args:
        common: what is the same on all ranks.

    Returns:
        Bytes of all files.

    Raises:
        CheckpointError: a tensor has gaps or overlaps, or a file cannot be written; cancelled.
        PeerTimeoutError: names a rank whose part did not come.
    """
    _wait_for_parts(folder, num_ranks, timeout_s, cancelled)
    metadata, sizes = Metadata({}, storage_data={}), {}
    for rank in range(num_ranks):
        path = folder / part_name(rank)
        sizes[path.name] = {"bytes": path.stat().st_size}
        _add(metadata, path.name, read_table(path))
    _check_cover(folder, metadata)
    formats = {
        f"{what}_backend{suffix}": value
        for what, backend in (("sharded", "torch_dist"), ("common", "torch"))
        for suffix, value in (("", backend), ("_version", 1))
    }
    common_file = io.BytesIO()
    torch.save(dict(common), common_file)
    for name, content in (
        ("common.pt", common_file.getvalue()),
        ("metadata.json", json.dumps(formats, allow_nan=False).encode()),
        (".metadata", pickle.dumps(metadata)),
    ):
        write_file(folder / name, content)
        sizes[name] = {"bytes": len(content), "crc32c": checksum(content)}
    write_file(folder / MANIFEST, json.dumps({"files": sizes}, indent=1, allow_nan=False).encode())
    return sum(size["bytes"] for size in sizes.values())


def write_file(path: Path, content: bytes) -> None:
    """Raises:
    CheckpointError: naming the file and what the system said.
    """

    def write() -> None:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    try:
        patiently(path, write)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error


def read_table(path: Path) -> list[Entry]:
    """Reads the table of a part.

    Raises:
        CheckpointError: it is cut short or damaged.
    """

    def read() -> tuple[bytes, int, bytes]:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - FOOTER.size, 0))
            magic, length, expected = FOOTER.unpack(file.read())
            file.seek(size - FOOTER.size - length)
            return magic, expected, file.read(length)

    try:
        magic, expected, table = patiently(path, read, damage_s=DAMAGE_S)
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if magic != MAGIC or checksum(table) != expected:
        raise CheckpointError(f"{path}: is damaged: its table of contents is not what was written")
    return [Entry(*line) for line in json.loads(table)]


class _Part:
    """A part being written, by several threads at a time."""

    def __init__(self, file: NewFile) -> None:
        self._file, self._end, self._entries = file, 0, list[Entry]()
        self._lock, self._failed = threading.Lock(), False

    def add_boxes(self, boxes: Iterator[Box]) -> None:
        with ThreadPoolExecutor(NUM_THREADS, "checkpoint") as pool:
            for done in [pool.submit(self._work, boxes) for _ in range(NUM_THREADS)]:
                done.result()

    def _work(self, boxes: Iterator[Box]) -> None:
        while not self._failed:
            with self._lock:
                box = next(boxes, None)
            if box is None:
                return
            try:
                with _without_zip_checksums():
                    self._add_box(box)
            except BaseException:
                self._failed = True  # the other threads need not go on
                raise

    def _add_box(self, box: Box) -> None:
        tensor = _own_memory(box.tensor)
        num_bytes = _size_as_saved(tensor)
        sink = _Sink(self._file, self._take(num_bytes))
        torch.save(tensor, cast(IO[bytes], sink))
        self._note(box.key, box, sink.finish(num_bytes))

    def add(self, key: str, content: bytes) -> None:
        sink = _Sink(self._file, self._take(len(content)))
        sink.write(content)
        self._note(key, None, sink.finish(len(content)))

    def finish(self) -> int:
        table = json.dumps(sorted(self._entries), separators=(",", ":")).encode()
        sink = _Sink(self._file, self._end)
        sink.write(table + FOOTER.pack(MAGIC, len(table), checksum(table)))
        sink.finish(len(table) + FOOTER.size)
        return self._end + len(table) + FOOTER.size

    def _take(self, num_bytes: int) -> int:
        with self._lock:
            at, self._end = self._end, self._end + num_bytes
            return at

    def _note(self, key: str, box: Box | None, written: tuple[int, int, int]) -> None:
        if box is None:
            entry = Entry(key, None, [], [], "", *written)
        else:
            dtype = str(box.tensor.dtype).removeprefix("torch.")
            entry = Entry(
                key, list(box.offset), list(box.tensor.shape), list(box.whole), dtype, *written
            )
        with self._lock:
            self._entries.append(entry)


class _Sink:
    """A file to torch.save, which gives a tensor's memory without copying it."""

    def __init__(self, file: NewFile, at: int) -> None:
        self._file, self._start, self._at, self._checksum = file, at, at, 0
        self._short: list[bytes] = []

    def write(self, data: "bytes | memoryview") -> int:
        view = memoryview(data).cast("B")
        self._checksum = checksum(view, self._checksum)
        if len(view) < _GATHERED_BYTES:
            self._short.append(bytes(view))  # not ours after this call
        else:
            self._flush()
            self._pwrite(view)
        return len(view)

    def flush(self) -> None: ...

    def finish(self, num_bytes: int) -> tuple[int, int, int]:
        """Returns the first byte in the file, the size and the checksum."""
        self._flush()
        assert self._at - self._start == num_bytes
        return self._start, num_bytes, self._checksum

    def _flush(self) -> None:
        if self._short:
            self._pwrite(memoryview(b"".join(self._short)))
            self._short.clear()

    def _pwrite(self, data: memoryview) -> None:
        self._file.pwrite(data, self._at)
        self._at += len(data)


class _Counter:
    """A file that only counts."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, data: "bytes | memoryview") -> int:
        self.num_bytes += len(data)
        return len(data)

    def flush(self) -> None: ...


def _size_as_saved(tensor: Tensor) -> int:
    counter = _Counter()
    torch.save(tensor, cast(IO[bytes], counter))
    return counter.num_bytes


def _own_memory(tensor: Tensor) -> Tensor:
    """Copies to contiguous host memory of its own: torch.save writes what a view is a view of."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """Torch's are slow, and not looked at when it reads; the table has better ones.

    Whether torch makes them is a setting of each thread.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _wait_for_parts(
    folder: Path, num_ranks: int, timeout_s: float, cancelled: Callable[[], bool]
) -> None:
    deadline, missing = time.monotonic() + timeout_s, set(map(part_name, range(num_ranks)))
    while True:
        missing -= set(names(folder))
        if not missing:
            return
        if cancelled():
            raise CheckpointError(f"{folder}: given up")
        if time.monotonic() > deadline:
            if not is_short():  # else ranks hold until there is room
                raise PeerTimeoutError(f"{folder}: no {min(missing)} within {timeout_s:.0f} s")
            deadline = time.monotonic() + min(timeout_s, _ROOM_S)
        time.sleep(_POLL_S)


def _add(metadata: Metadata, file: str, table: list[Entry]) -> None:
    for entry in table:
        where = _StorageInfo(file, entry.at, entry.num_bytes)
        if entry.offset is None:
            metadata.state_dict_metadata[entry.key] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(entry.key)] = where
            continue
        made = TensorStorageMetadata(
            TensorProperties(getattr(torch, entry.dtype)), torch.Size(entry.whole), []
        )
        tensor = metadata.state_dict_metadata.setdefault(entry.key, made)
        assert isinstance(tensor, TensorStorageMetadata)
        offset = torch.Size(entry.offset)
        tensor.chunks.append(ChunkStorageMetadata(offset, torch.Size(entry.shape)))
        metadata.storage_data[MetadataIndex(entry.key, offset, len(tensor.chunks) - 1)] = where


def _check_cover(folder: Path, metadata: Metadata) -> None:
    """Every element of every tensor is there, once."""
    for key, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            found = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if found != math.prod(tensor.size):
                raise CheckpointError(
                    f"{folder}: ranks wrote {found} of the {math.prod(tensor.size)} elements "
                    f"of {key}: an error in this program"
                )
