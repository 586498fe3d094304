"""Tensors that live in host memory and pass through the device in pieces, to be changed there."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_hpc.errors import ConfigError

_SLOTS = 3
"""One piece comes in, one is changed, one goes out: both directions of the bus are busy."""


class HostMemory:
    """One block of page-locked memory, of which tensors are taken.

    Torch's own pinned allocator rounds every block up to a power of two.
    """

    ALIGNMENT = 64

    def __init__(
        self, num_bytes: int, device: torch.device, setting: str = "actor.optimizer.offload"
    ) -> None:
        """Locks the pages if `device` is a GPU, whose copies then do not wait for the CPU.

        Args:
            setting: of the job, that wants the memory.

        Raises:
            ConfigError: they cannot be locked.
        """
        self._block = torch.empty(num_bytes, dtype=torch.uint8)
        self._used = 0
        if device.type == "cuda":
            status = int(_runtime().cudaHostRegister(self._block.data_ptr(), num_bytes, 0))
            if status:
                raise ConfigError(
                    f"{setting}: {num_bytes / 2**30:.1f} GiB of host memory cannot "
                    f"be page-locked (CUDA error {status}); ask for more memory, or have less there"
                )
            weakref.finalize(self, _unlock, self._block)

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] uninitialised; freed with the whole."""
        num_bytes = count * dtype.itemsize
        taken = self._block[self._used : self._used + num_bytes].view(dtype)
        self._used += -(-num_bytes // self.ALIGNMENT) * self.ALIGNMENT
        return taken


def _unlock(block: Tensor) -> None:
    _runtime().cudaHostUnregister(block.data_ptr())


def _runtime() -> Any:  # noqa: ANN401
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def streamed(
    pieces: Sequence[Sequence[Tensor]],
    device: torch.device,
    change: Callable[[int, list[Tensor]], None],
) -> None:
    """Copies every piece to the device, lets it be changed in place there, and copies it back.

    Returns when all of it is back in host memory.

    Args:
        pieces: contiguous tensors in host memory; page-locked, or the copies wait for each other.
        change: (number of the piece, its tensors on the device).
    """
    size = max(sum(_padded(tensor) for tensor in piece) for piece in pieces)
    incoming, here, outgoing = (_Lane(stream) for stream in _streams(device))
    incoming.wait(here.mark())
    slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_SLOTS)]
    free: list[Any] = [None] * _SLOTS
    for number, piece in enumerate(pieces):
        near = _carved(slots[number % _SLOTS], piece)
        incoming.wait(free[number % _SLOTS])
        incoming.copy(piece, near)
        here.wait(incoming.mark())
        change(number, near)
        outgoing.wait(here.mark())
        outgoing.copy(near, piece)
        free[number % _SLOTS] = outgoing.mark()
    outgoing.finish()


class _Lane:
    """A stream of a GPU; on a CPU everything happens in the order of the calls."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    def mark(self) -> torch.cuda.Event | None:
        return self._stream.record_event() if self._stream else None

    def wait(self, mark: torch.cuda.Event | None) -> None:
        if self._stream and mark:
            self._stream.wait_event(mark)

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        with torch.cuda.stream(self._stream):  # None: as it is
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        if self._stream:
            self._stream.synchronize()


def _streams(device: torch.device) -> list[torch.cuda.Stream | None]:
    if device.type != "cuda":
        return [None] * 3
    return [
        torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(device),
        torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
    ]


def _carved(slot: Tensor, piece: Sequence[Tensor]) -> list[Tensor]:
    carved, used = [], 0
    for tensor in piece:
        carved.append(slot[used : used + tensor.nbytes].view(tensor.dtype))
        used += _padded(tensor)
    return carved


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // HostMemory.ALIGNMENT) * HostMemory.ALIGNMENT
