"""Writes and reads checkpoints in torch's distributed format, which Megatron reads: one part per
rank.

`__<rank>_0.distcp` holds tensors end to end, each as torch.save writes it. After them come a table
of contents, with a CRC32C of each, and a footer with the table's offset. A part gets its name when
all of it is on disk, which tells rank 0 that it is complete; rank 0 then writes the index. Ranks
need not communicate, so all of this can happen beside training.

A refused write is retried at the same place. A flush is not: its data may be lost, and its tensors
are gone by then. So the save has failed, and a later one will be complete.

Parts are read box by box, and verified. torch's format pickles `.metadata` and non-tensors, and a
checkpoint may be somebody else's folder. So unpickling only makes the few classes that such files
consist of; nothing else is imported or called.
"""

import errno
import io
import json
import math
import os
import pickle
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as kinds
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from relax_hpc.errors import CheckpointError, ConfigError, PeerTimeoutError, without_number
from relax_hpc.runtime.files.records import checksum, read_bytes
from relax_hpc.runtime.files.storage import DAMAGE_S, is_short, move, names, patiently


class Box(NamedTuple):
    """A part of a tensor of the whole model, or a target for it."""

    key: str
    offset: tuple[int, ...]
    """Indices of the first element in the whole tensor."""
    whole: tuple[int, ...]
    tensor: Tensor


class NewFile:
    """A file written once, at offsets, from any thread; retries refused writes."""

    def __init__(self, path: Path) -> None:
        self._path, self._fds = path, list[int]()
        patiently(path, lambda: self._open(os.O_CREAT | os.O_TRUNC))

    def pwrite(self, data: memoryview, at: int) -> None:
        while data:
            written = patiently(self._path, partial(self._pwrite, data, at))
            at, data = at + written, data[written:]

    def sync(self) -> None:
        for fd in self._fds:
            os.fsync(fd)

    def close(self) -> None:
        """Closes it: some file systems report a lack of room only now."""
        while self._fds:
            os.close(self._fds.pop())

    def _open(self, flags: int) -> None:
        self._fds.append(os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666))

    def _pwrite(self, data: memoryview, at: int) -> int:
        try:
            return os.pwrite(self._fds[-1], data, at)
        except OSError as error:
            if error.errno == errno.ESTALE:  # the server forgot it; other threads may be at it
                self._open(0)
            raise


FOOTER = struct.Struct("<8sQI4x")
"""MAGIC, bytes of the table, its checksum; the last bytes of a part."""
MAGIC = b"RLXCKPT1"
MANIFEST = "manifest.json"
NUM_THREADS = 4
_GATHERED_BYTES = 1 << 16  # shorter pieces are written with what follows
_POLL_S = 0.05
_ROOM_S = 10.0
"""Interval of checks whether there is room again."""


class Entry(NamedTuple):
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
    """Writes one rank's data, safe against a power cut.

    Args:
        boxes: taken one at a time by several threads, and freed once written.

    Returns:
        Bytes of the file.

    Raises:
        CheckpointError: has the file and the system's error.
    """
    final = folder / part_name(rank)
    draft = final.with_name(f".{final.name}.tmp")
    try:
        with closing(NewFile(draft)) as file:
            part = _PartWriter(file)
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
    """Waits for all parts and writes the index: then the checkpoint is readable.

    Args:
        common: state that is the same on all ranks.

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
    CheckpointError: has the file and the system's error."""

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
        CheckpointError: it is truncated or damaged.
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
        raise CheckpointError(f"{path}: cannot be read: {without_number(error)}") from error
    if magic != MAGIC or checksum(table) != expected:
        raise CheckpointError(f"{path}: is damaged: its table of contents is not what was written")
    return [Entry(*line) for line in json.loads(table)]


class _PartWriter:
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
    """A file for torch.save, which passes a tensor's memory without a copy."""

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
    """Copies to contiguous host memory of its own: torch.save writes the whole storage of a
    view."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """Turns off torch's checksums: they are slow, and unused when torch reads; the table has better
    ones.

    The setting is thread-local.
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
    """Checks that every element of every tensor is there, once."""
    for key, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            found = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if found != math.prod(tensor.size):
                raise CheckpointError(
                    f"{folder}: ranks wrote {found} of the {math.prod(tensor.size)} elements "
                    f"of {key}: an error in this program"
                )


NAME = ".metadata"

_MEMORY_FORMATS = "_MEM_FORMAT_ENCODING"
_CLASSES = {
    **dict.fromkeys(
        (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
            "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", _MEMORY_FORMATS,
        ),
        "torch.distributed.checkpoint.metadata",
    ),
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "_get_layout": "torch.serialization",
    "Size": "torch",
}  # fmt: skip
"""Classes in `.metadata`: name -> module. Element types (`torch.float32`) come on top."""


def metadata(folder: Path) -> Metadata:
    """Reads which tensors and objects a checkpoint has, and where.

    Raises:
        CheckpointError: it is damaged, or holds unexpected classes.
    """
    path = folder / NAME
    try:
        found = _Unpickler(io.BytesIO(read_bytes(path))).load()
    except _RefusedError as error:
        raise _refuse(path, str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except Exception as error:  # damaged pickles raise whatever they like
        raise CheckpointError(f"{path}: is damaged: {error}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path}: is damaged: holds a {type(found).__name__}")
    return found


def load(content: bytes, path: Path) -> Any:  # noqa: ANN401
    """Loads tensors and plain values written by torch.save.

    Args:
        content: the bytes.

    Raises:
        CheckpointError: it is damaged, or holds something else.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if (other := re.search(r"GLOBAL (\S+)", str(error))) is None:
            raise CheckpointError(f"{path}: is damaged: {str(error).splitlines()[0]}") from error
        raise _refuse(path, other[1]) from None


def _refuse(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: holds {name}, which no checkpoint consists of; it was not run, but trust nothing "
        "else of this folder"
    )


class _RefusedError(Exception):
    """A pickle names an unknown class."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        if _CLASSES.get(name) == module:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) == ("builtins", "getattr"):
            return _memory_format  # how some releases of Python pickle the member of an enum
        raise _RefusedError(f"{module}.{name}")


def _memory_format(enum: object, name: str) -> Enum:
    known: type[Enum] = getattr(kinds, _MEMORY_FORMATS)
    if enum is not known:
        raise _RefusedError("builtins.getattr")
    return known[name]


def damage(folder: Path) -> str | None:
    """Returns why a checkpoint is incomplete, naming the file; None if nothing shows.

    Checks the size of every file, and the checksum of small ones. Tensors are checked when they are
    read.
    """
    manifest = folder / MANIFEST
    try:
        return patiently(manifest, lambda: _damage(folder, manifest), damage_s=DAMAGE_S)
    except OSError as error:
        return f"{error.filename or manifest}: {error.strerror}"


def _damage(folder: Path, manifest: Path) -> str | None:
    try:
        for name, expected in json.loads(manifest.read_bytes())["files"].items():
            path = folder / name
            if path.name != name or not (path.is_file() or not path.exists()):
                return f"{manifest}: names {name!r}, which is no file of a checkpoint"
            if path.stat().st_size != expected["bytes"]:
                return f"{path}: has {path.stat().st_size} bytes of {expected['bytes']}"
            if "crc32c" in expected and checksum(path.read_bytes()) != expected["crc32c"]:
                return f"{path}: is damaged: its checksum is not what was written"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{manifest}: is damaged"
    return None


class _Read(NamedTuple):
    """The wanted parts of one stored tensor."""

    file: str
    at: int
    num_bytes: int
    key: str
    targets: list[tuple[Tensor, tuple[slice, ...]]]
    """(target, slices of the stored tensor) each."""


class StoredCheckpoint:
    """A checkpoint on disk.

    Raises:
        CheckpointError: it is incomplete. In methods: data are damaged.
    """

    def __init__(self, folder: Path) -> None:
        if wrong := damage(folder):
            raise CheckpointError(wrong)
        self.folder = folder
        self._metadata = metadata(folder)
        common = folder / "common.pt"
        self.common: dict[str, Any] = load(read_bytes(common), common)
        self._checksums: dict[str, dict[int, int]] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(tensor.size) for key, tensor in self._tensors()}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {key: tensor.properties.dtype for key, tensor in self._tensors()}

    @property
    def lora(self) -> dict[str, Any] | None:
        """Returns the settings of its adapters, if any."""
        found: dict[str, Any] | None = self.common.get("notes", {}).get("lora")
        return found

    def refuse_adapters(self) -> None:
        """Checks that there are only a model's weights.

        Raises:
            ConfigError: there are adapters as well.
        """
        if self.lora:
            raise ConfigError(
                f"{self.folder}: is a model and adapters of rank {self.lora['rank']}; "
                "relax-hpc convert ... --to hf makes one of them, for model.path"
            )

    def object(self, key: str) -> bytes:
        """Reads the bytes of a non-tensor.

        Raises:
            KeyError: there is no such object.
        """
        if not isinstance(self._metadata.state_dict_metadata.get(key), BytesStorageMetadata):
            raise KeyError(key)
        where = self._metadata.storage_data[MetadataIndex(key)]
        return self._bytes(where.relative_path, where.offset, where.length)

    def tensor(self, key: str) -> Tensor:
        """Reads a whole tensor into host memory."""
        size = self.shapes()[key]
        made = torch.empty(size, dtype=self.dtypes()[key])
        self.fill([Box(key, (0,) * len(size), size, made)])
        return made

    def fill(self, boxes: Sequence[Box]) -> None:
        """Fills the tensors of `boxes`, whose dtypes may differ from the stored ones.

        Raises:
            ConfigError: the checkpoint is of another model: a tensor is missing, or of another
                shape.
        """
        reads: dict[tuple[str, int], _Read] = {}
        for box in boxes:
            self._find(box, reads)
        in_order = sorted(reads.values())
        with ThreadPoolExecutor(NUM_THREADS, "checkpoint") as pool:
            for _ in pool.map(self._read, in_order):
                pass

    def _find(self, box: Box, reads: dict[tuple[str, int], _Read]) -> None:
        stored = self._metadata.state_dict_metadata.get(box.key)
        if not isinstance(stored, TensorStorageMetadata):
            raise ConfigError(
                f"{self.folder}: has no {box.key}; it is a checkpoint of another model"
            )
        if tuple(stored.size) != box.whole:
            raise ConfigError(
                f"{self.folder}: {box.key} is {list(stored.size)} there, {list(box.whole)} in "
                "this model; it is a checkpoint of another model"
            )
        for number, chunk in enumerate(stored.chunks):
            overlap = _overlap(box, tuple(chunk.offsets), tuple(chunk.sizes))
            if overlap is None:
                continue
            here, there = overlap
            where = self._metadata.storage_data[MetadataIndex(box.key, chunk.offsets, number)]
            read = reads.setdefault(
                (where.relative_path, where.offset),
                _Read(where.relative_path, where.offset, where.length, box.key, []),
            )
            read.targets.append((box.tensor[here], there))

    def _read(self, read: _Read) -> None:
        content = self._bytes(read.file, read.at, read.num_bytes)
        stored = load(content, self.folder / read.file)
        for target, part in read.targets:
            target.copy_(stored[part])

    def _bytes(self, file: str, at: int, num_bytes: int) -> bytes:
        path = self.folder / file
        if path.name != file:
            raise CheckpointError(f"{self.folder / NAME}: names {file!r}, outside of the folder")
        if file not in self._checksums:
            self._checksums[file] = {entry.at: entry.checksum for entry in read_table(path)}

        def read() -> bytes:
            with path.open("rb", buffering=0) as stream:
                stream.seek(at)
                return b"".join(_pieces(stream, num_bytes))

        try:
            content = patiently(path, read, damage_s=DAMAGE_S)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        if len(content) != num_bytes or checksum(content) != self._checksums[file].get(at):
            raise CheckpointError(
                f"{path}: is damaged: bytes {at} to {at + num_bytes} are not what was written"
            )
        return content

    def _tensors(self) -> Iterator[tuple[str, TensorStorageMetadata]]:
        for key, stored in self._metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                yield key, stored


def _pieces(stream: io.FileIO, num_bytes: int) -> Iterator[bytes]:
    """Yields pieces: the system returns at most 2 GiB at a time."""
    while num_bytes and (piece := cast(bytes, stream.read(num_bytes))):
        num_bytes -= len(piece)
        yield piece


def _overlap(
    box: Box, offset: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Returns the common ranges of the box and a stored tensor, in each; None if there are none."""
    here, there = [], []
    for first, size, at, length in zip(box.offset, box.tensor.shape, offset, shape, strict=True):
        low, high = max(first, at), min(first + size, at + length)
        if low >= high:
            return None
        here.append(slice(low - first, high - first))
        there.append(slice(low - at, high - at))
    return tuple(here), tuple(there)
