"""Reads checkpoints that `part_files` made, box by box, and checks what it reads."""

import io
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from relax_hpc.engines.megatron.checkpoint import pickles
from relax_hpc.engines.megatron.checkpoint.boxes import Box
from relax_hpc.engines.megatron.checkpoint.part_files import (
    MANIFEST,
    NUM_THREADS,
    read_table,
)
from relax_hpc.errors import CheckpointError, ConfigError
from relax_hpc.records import checksum, read_bytes
from relax_hpc.storage import DAMAGE_S, patiently


def damage(folder: Path) -> str | None:
    """Returns why a checkpoint is not whole, naming the file; None if nothing shows.

    Every file is there with its size, and the small ones have their checksum. Tensors are checked
    when they are read.
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
    """The parts of one stored tensor that are wanted."""

    file: str
    at: int
    num_bytes: int
    key: str
    targets: list[tuple[Tensor, tuple[slice, ...]]]
    """(where to, what of it) each."""


class Stored:
    """A checkpoint on disk.

    Raises:
        CheckpointError: it is not whole. By the methods: something is damaged.
    """

    def __init__(self, folder: Path) -> None:
        if wrong := damage(folder):
            raise CheckpointError(wrong)
        self.folder = folder
        self._metadata = pickles.metadata(folder)
        common = folder / "common.pt"
        self.common: dict[str, Any] = pickles.saved(read_bytes(common), common)
        self._checksums: dict[str, dict[int, int]] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all tensors by key."""
        return {key: tuple(tensor.size) for key, tensor in self._tensors()}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {key: tensor.properties.dtype for key, tensor in self._tensors()}

    @property
    def lora(self) -> dict[str, Any] | None:
        """Returns the settings of the adapters that it has, if it has some."""
        found: dict[str, Any] | None = self.common.get("notes", {}).get("lora")
        return found

    def refuse_adapters(self) -> None:
        """Refuses what is not a model's weights alone.

        Raises:
            ConfigError: there are adapters beside them.
        """
        if self.lora:
            raise ConfigError(
                f"{self.folder}: is a model and adapters of rank {self.lora['rank']}; "
                "relax-hpc convert ... --to hf makes one of them, for model.path"
            )

    def object(self, key: str) -> bytes:
        """Reads the bytes of something that is not a tensor.

        Raises:
            KeyError: there is no such object.
        """
        if not isinstance(self._metadata.state_dict_metadata.get(key), BytesStorageMetadata):
            raise KeyError(key)
        where = self._metadata.storage_data[MetadataIndex(key)]
        return self._bytes(where.relative_path, where.offset, where.length)

    def tensor(self, key: str) -> Tensor:
        """A whole one, in host memory."""
        size = self.shapes()[key]
        made = torch.empty(size, dtype=self.dtypes()[key])
        self.fill([Box(key, (0,) * len(size), size, made)])
        return made

    def fill(self, boxes: Sequence[Box]) -> None:
        """Copies into the tensors of `boxes`, whose types may differ from the stored ones.

        Raises:
            ConfigError: the checkpoint is of another model: a tensor is not there, or of another
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
        stored = pickles.saved(content, self.folder / read.file)
        for target, part in read.targets:
            target.copy_(stored[part])

    def _bytes(self, file: str, at: int, num_bytes: int) -> bytes:
        path = self.folder / file
        if path.name != file:
            raise CheckpointError(
                f"{self.folder / pickles.NAME}: names {file!r}, outside of the folder"
            )
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
    """The system gives at most 2 GiB at a time."""
    while num_bytes and (piece := cast(bytes, stream.read(num_bytes))):
        num_bytes -= len(piece)
        yield piece


def _overlap(
    box: Box, offset: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Returns the ranges that the box and a stored tensor share, in each; None: there are none."""
    here, there = [], []
    for first, size, at, length in zip(box.offset, box.tensor.shape, offset, shape, strict=True):
        low, high = max(first, at), min(first + size, at + length)
        if low >= high:
            return None
        here.append(slice(low - first, high - first))
        there.append(slice(low - at, high - at))
    return tuple(here), tuple(there)
