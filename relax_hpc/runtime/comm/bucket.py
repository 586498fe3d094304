"""Packs named tensors into flat byte buffers, and digests them.

The layout is SGLang's `flattened_bucket`: the bytes of the tensors, end to end, in the order of
their names. One message then needs one broadcast, however many tensors it carries.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

NamedTensors = Sequence[tuple[str, Tensor]]
_WORDS = 1 << 23
"""Words of 8 bytes per pass of `fingerprint`; bounds its memory."""
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


class Spec(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    learns: bool = True
    """Whether training changes it; only the sender knows."""

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """The assignment of tensors to buckets, in order: fixed for a run, equal on all sides."""

    buckets: tuple[tuple[Spec, ...], ...]

    @classmethod
    def of(cls, specs: Iterable[Spec], max_bytes: int) -> Self:
        """Cuts the stream into buckets of at most `max_bytes`; a single larger tensor gets its own.

        A bucket never mixes tensors that learn with fixed ones.
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
        return [sum(spec.nbytes for spec in bucket) for bucket in self.buckets]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    @cached_property
    def fixed(self) -> tuple[int, ...]:
        """Indices of the buckets in which nothing learns."""
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
    """Returns the tensors of a bucket as views of its bytes.

    Raises:
        RuntimeError: a tensor's offset is not a multiple of its element size.
    """
    return [piece.view(spec.dtype).view(spec.shape) for spec, piece in _pieces(flat, bucket)]


def unflatten(flat: Tensor, bucket: Iterable[Spec]) -> list[tuple[str, Tensor]]:
    """Returns the named tensors of a bucket: as `views`, but unaligned tensors are copies."""
    found = []
    for spec, piece in _pieces(flat, bucket):
        aligned = piece.clone() if piece.storage_offset() % spec.dtype.itemsize else piece
        found.append((spec.name, aligned.view(spec.dtype).view(spec.shape)))
    return found


def _pieces(flat: Tensor, bucket: Iterable[Spec]) -> Iterator[tuple[Spec, Tensor]]:
    start = 0
    for spec in bucket:
        yield spec, flat[start : start + spec.nbytes]
        start += spec.nbytes


def fingerprint(flat: Tensor) -> int:
    """Hashes [n] uint8 to 64 bits, equal on every device; the buffer starts at a multiple of 8
    bytes.

    Sum of the words times odd position-dependent factors, modulo 2**64: always detects a change of
    one word. Not cryptographic.
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
        """Yields the same tensors, adding each as it passes."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def hexdigest(self) -> str:
        return hashlib.sha256("".join(sorted(self._lines)).encode()).hexdigest()


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
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


class Sending(Protocol):
    """A bucket being sent."""

    def order_after(self) -> None:
        """Orders later work of the current stream after it."""
        ...

    def wait(self, deadline: float, give_up: Callable[[], None]) -> None:
        """Blocks until it is sent.

        Args:
            deadline: of time.monotonic().
            give_up: called repeatedly meanwhile; an error that it raises ends the wait.

        Raises:
            TimeoutError: the deadline passed.
        """
        ...


class Wire(Protocol):
    def start(self, tensor: Tensor) -> Sending:
        """Begins to send a buffer, after the work queued on the current stream."""
        ...
