"""Named tensors as flat byte buffers, and their digest.

The layout is the one SGLang calls `flattened_bucket`: the bytes of the tensors, end to end, in the
order of their names. A message then has one broadcast, however many tensors it carries.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

NamedTensors = Sequence[tuple[str, Tensor]]
_WORDS = 1 << 23
"""Words of 8 bytes that a fingerprint takes at a time, which bounds its memory."""
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


class Spec(NamedTuple):
    """A tensor to be sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    learns: bool = True
    """Whether it differs from version to version; only the sender knows."""

    @property
    def nbytes(self) -> int:
        return num_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class BucketPlan:
    """A cut of the tensors into buckets, in order: fixed for a run, equal on all sides."""

    buckets: tuple[tuple[Spec, ...], ...]

    @classmethod
    def of(cls, specs: Iterable[Spec], max_bytes: int) -> Self:
        """Cuts the stream into buckets of at most `max_bytes`; one tensor may exceed it.

        Tensors that learn and others are never in one bucket.
        """
        cut: list[list[Spec]] = []
        size = max_bytes
        for spec in specs:
            if size + spec.nbytes > max_bytes or cut[-1][-1].learns != spec.learns:
                cut.append([])
                size = 0
            cut[-1].append(spec)
            size += spec.nbytes
        return cls(tuple(map(tuple, cut)))

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each bucket."""
        return [sum(spec.nbytes for spec in bucket) for bucket in self.buckets]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    @cached_property
    def fixed(self) -> tuple[int, ...]:
        """Numbers of the buckets in which nothing learns."""
        return tuple(n for n, bucket in enumerate(self.buckets) if not bucket[0].learns)

    def buffers(self, count: int, device: torch.device) -> list[Tensor]:
        """Returns `count` buffers for buckets, [bytes of the largest] uint8."""
        size = max(self.sizes)
        return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]

    @cached_property
    def hash(self) -> str:
        """SHA-256 of names, types, shapes and cuts: what sender and receivers must agree on."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(
            [
                [(spec.name, dtype_name(spec.dtype), spec.shape) for spec in bucket]
                for bucket in self.buckets
            ]
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(
            tuple(
                tuple(Spec(name, dtype_of(dtype), tuple(shape)) for name, dtype, shape in b)
                for b in json.loads(text)
            )
        )


def views(flat: Tensor, bucket: Iterable[Spec]) -> list[Tensor]:
    """The tensors of a bucket, as views of its bytes.

    Raises:
        RuntimeError: a tensor's place is not a multiple of its type's size.
    """
    found, start = [], 0
    for spec in bucket:
        end = start + spec.nbytes
        found.append(flat[start:end].view(spec.dtype).view(spec.shape))
        start = end
    return found


def fingerprint(flat: Tensor) -> int:
    """A number of 64 bits that any change of the bytes, or of their order, is as good as sure to
    change; equal on every device. [n] uint8, beginning at a multiple of 8 bytes.

    The sum of words times odd numbers that differ by their place, modulo 2**64: exact for a change
    of one word. No defence against someone who means to deceive.
    """
    whole = len(flat) // 8 * 8
    words = flat[:whole].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(words), _WORDS):
        part = words[start : start + _WORDS]
        place = torch.arange(start, start + len(part), device=flat.device)
        total += place.mul_(_GOLDEN).bitwise_or_(1).mul_(part).sum()
    rest = int.from_bytes(bytes(flat[whole:].cpu().numpy()), "little")
    return (int(total) + rest * (2 * len(flat) + 1)) % (1 << 64)


def buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[NamedTensors]:
    """Cuts a stream of tensors into buckets of at most `max_bytes` (one tensor may exceed it)."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Bytes of `tensors` end to end. Returns [sum of nbytes] uint8 on their device."""
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


def unflatten(
    flat: Tensor, specs: Iterable[tuple[str, torch.dtype, Sequence[int]]]
) -> list[tuple[str, Tensor]]:
    """The inverse of `flatten`; the tensors are copies where the bytes are not aligned."""
    tensors, start = [], 0
    for name, dtype, shape in specs:
        size = torch.Size(shape).numel() * dtype.itemsize
        piece = flat[start : start + size]
        if start % dtype.itemsize:
            piece = piece.clone()
        tensors.append((name, piece.view(dtype).view(*shape)))
        start += size
    return tensors


def num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


class Digest:
    """SHA-256 over names, dtypes, shapes and bytes, whatever order they come in.

    Two models with equal digests hold the same weights bit for bit, names included.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, tensor: Tensor) -> None:
        cpu = tensor.detach().cpu().contiguous()
        content = hashlib.sha256(cpu.view(-1).view(torch.uint8).numpy().data).hexdigest()
        self._lines.append(f"{name} {cpu.dtype} {tuple(cpu.shape)} {content}\n")

    def of_all(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, each added as it goes by."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def hexdigest(self) -> str:
        return hashlib.sha256("".join(sorted(self._lines)).encode()).hexdigest()


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """See `Digest`."""
    found = Digest()
    for name, tensor in tensors:
        found.add(name, tensor)
    return found.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
