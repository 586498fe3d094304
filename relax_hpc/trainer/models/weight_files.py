"""Writes safetensors files on several ranks side by side, each its share, as tensors arrive.

The place of every tensor is fixed before the first one arrives. So the head of a file is written
first, and a rank holds only the few tensors on their way to the disk.
"""

import json
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_hpc.runtime.comm.bucket import BucketPlan, Spec
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.files.storage import FULL, patiently

Content = npt.NDArray[np.uint8]

FILE_BYTES = 5 << 30
MANIFEST = "manifest.json"
_PENDING_BYTES = 1 << 29
_CHUNK_BYTES = 1 << 26
_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
}


class WeightFile(NamedTuple):
    name: str
    writer: int
    specs: tuple[Spec, ...]
    """Tensors of the file, all of the same element size, in their order."""

    @property
    def head(self) -> bytes:
        """Returns the head of the file: a length and, padded to 8 bytes, names and places."""
        record: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for spec in self.specs:
            end = start + spec.nbytes
            record[spec.name] = {
                "dtype": _TYPES[spec.dtype],
                "shape": spec.shape,
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(record, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def num_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def plan_files(
    specs: Iterable[Spec], num_writers: int, *, max_bytes: int = FILE_BYTES
) -> list[WeightFile]:
    """Divides tensors among ranks so that each writes equally much, all the time.

    Args:
        specs: in order of arrival; each goes to the rank with the least so far.
        max_bytes: of a file; a larger tensor is alone.
    """
    shares: list[list[Spec]] = [[] for _ in range(num_writers)]
    sizes = [0] * num_writers
    for spec in specs:
        writer = sizes.index(min(sizes))
        shares[writer].append(spec)
        sizes[writer] += spec.nbytes
    cut = [
        (writer, bucket)
        for writer, share in enumerate(shares)
        for kind in _by_element_size(share)
        for bucket in BucketPlan.of(kind, max_bytes).buckets
    ]
    return [
        WeightFile(f"model-{number:05}-of-{len(cut):05}.safetensors", writer, bucket)
        for number, (writer, bucket) in enumerate(cut, start=1)
    ]


def _by_element_size(specs: Sequence[Spec]) -> list[list[Spec]]:
    """Sorts specs, so that tensors follow each other in a file without gaps and are aligned."""
    sizes = sorted({spec.dtype.itemsize for spec in specs}, reverse=True)
    return [[spec for spec in specs if spec.dtype.itemsize == size] for size in sizes]


class FileRecord(NamedTuple):
    num_bytes: int
    crc32: int


class Manifest(NamedTuple):
    """A record of a complete folder and its files."""

    version: int
    files: dict[str, FileRecord]

    @property
    def checksums(self) -> list[int]:
        """Returns the CRC-32 of the files, in the order of their names."""
        return [self.files[name].crc32 for name in sorted(self.files)]

    def write(self, folder: Path) -> None:
        files = {name: record._asdict() for name, record in sorted(self.files.items())}
        write_json(folder / MANIFEST, {"version": self.version, "files": files})

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Returns None if there is none: the folder is incomplete."""
        record = read_json(folder / MANIFEST)
        if record is None:
            return None
        files = {name: FileRecord(**fields) for name, fields in record["files"].items()}
        return cls(record["version"], files)

    def find_damaged(self, folder: Path) -> list[str]:
        """Returns the files that differ from what was written; reads all of them."""
        return [name for name in self.files if checksum(folder / name) != self.files[name]]


def checksum(path: Path) -> FileRecord:
    """Reads the current file; a missing one counts as empty."""
    size = crc = 0
    if path.exists():
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return FileRecord(size, crc)


class FileReader:
    """Reads a file once, from beginning to end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.checksum = 0

    def buckets(self, max_bytes: int) -> Iterator[tuple[Sequence[Spec], Content]]:
        """Yields consecutive tensors, and their bytes.

        Args:
            max_bytes: of a bucket; a larger tensor is alone.
        """
        with self._path.open("rb") as file:
            length = int.from_bytes(self._read(file, 8).tobytes(), "little")
            specs = _specs(json.loads(self._read(file, length).tobytes()))
            plan = BucketPlan.of(specs, max_bytes)
            for bucket, size in zip(plan.buckets, plan.sizes, strict=True):
                yield bucket, self._read(file, size)

    def _read(self, file: BufferedReader, size: int) -> Content:
        content = np.fromfile(file, np.uint8, size)
        self.checksum = zlib.crc32(content.data, self.checksum)
        return content


def _specs(head: dict[str, Any]) -> list[Spec]:
    types = {name: dtype for dtype, name in _TYPES.items()}
    found = [(name, fields) for name, fields in head.items() if name != "__metadata__"]
    found.sort(key=lambda item: item[1]["data_offsets"])
    return [Spec(name, types[item["dtype"]], tuple(item["shape"])) for name, item in found]


class FileWriter:
    """Writes one rank's files of a folder, in a thread of its own."""

    def __init__(self, folder: Path, files: Iterable[WeightFile]) -> None:
        self._folder = folder
        self._outputs = {file.name: _Output(folder / file.name, file) for file in files}
        self._output_of = {
            spec.name: output for output in self._outputs.values() for spec in output.file.specs
        }
        self._pending = deque[tuple[Future[None], int]]()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight files")
        self._error: OSError | None = None

    def write(self, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, FileRecord]:
        """Takes all tensors, also after an error: gathering them needs every rank.

        Raises:
            OSError: a file could not be written.
        """
        for name, tensor in tensors:
            if name in self._output_of and not self._error:
                self._add(self._output_of[name], name, tensor)
        self._wait(until=0)
        self._thread.shutdown()
        try:
            records = {name: output.close() for name, output in self._outputs.items()}
        except OSError as error:
            self._error = self._error or error
        if self._error:
            raise self._error
        return records

    def _add(self, output: "_Output", name: str, tensor: Tensor) -> None:
        host = tensor.detach().contiguous().cpu()
        self._wait(until=_PENDING_BYTES)
        self._pending.append((self._thread.submit(output.add, name, host), host.nbytes))

    def _wait(self, *, until: int) -> None:
        while self._pending and sum(size for _, size in self._pending) > until:
            future, _ = self._pending.popleft()
            try:
                future.result()
            except OSError as error:
                self._error = self._error or error


class _Output:
    def __init__(self, path: Path, file: WeightFile) -> None:
        self.file = file
        self._path = path
        self._raw: FileIO | None = None
        self._left = deque(file.specs)
        self._size = self._crc = 0

    def add(self, name: str, tensor: Tensor) -> None:
        spec = self._left.popleft()
        assert (name, tensor.dtype, tuple(tensor.shape)) == spec[:3], f"{name} is not {spec}"
        if self._raw is None:
            self._raw = FileIO(self._path, "xb")
            self._append(memoryview(self.file.head))
        self._append(memoryview(tensor.view(-1).view(torch.uint8).numpy().data))

    def close(self) -> FileRecord:
        """Closes the file: some file systems report a lack of room only now."""
        if self._raw is not None:
            self._raw.close()
        return FileRecord(self._size, self._crc)

    def _append(self, content: memoryview) -> None:
        assert self._raw is not None
        while content:
            piece = content[:_CHUNK_BYTES]
            written = patiently(self._path, partial(self._raw.write, piece), errors=FULL)
            self._crc = zlib.crc32(content[:written], self._crc)
            self._size += written
            content = content[written:]
