"""Named tensors as flat byte buffers, and their digest.

The layout is the one SGLang calls `flattened_bucket`: the bytes of the tensors, end to end, in the
order of their names. A message then has one broadcast, however many tensors it carries.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

NamedTensors = Sequence[tuple[str, Tensor]]


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


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, whatever order they come in.

    Two models with equal digests hold the same weights bit for bit, names included.
    """
    lines = []
    for name, tensor in tensors:
        cpu = tensor.detach().cpu().contiguous()
        content = hashlib.sha256(cpu.view(-1).view(torch.uint8).numpy().data).hexdigest()
        lines.append(f"{name} {cpu.dtype} {tuple(cpu.shape)} {content}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def plan_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, dtypes and shapes in order: what sender and receivers must agree on."""
    text = "\n".join(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in tensors)
    return hashlib.sha256(text.encode()).hexdigest()
