"""Copies of tensors in host memory that stays: what is written while training goes on."""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relax_hpc.engines.megatron.checkpoint import host_blocks
from relax_hpc.errors import CheckpointError

_ALIGNMENT = 64
_BLOCK = 1 << 30
"""Bytes that are taken and locked at once: CUDA stands still only for so long."""


class _Place(NamedTuple):
    """The place of a copy."""

    block: int
    start: int
    """Byte of the block."""


class HostCopy:
    """Blocks of memory, for one set of copies at a time.

    They are taken in the background, as soon as one knows how much is to be saved. For tensors of
    a GPU their pages are locked, so that the GPU writes into them at the speed of the bus; torch's
    own pinned memory would round them up to a power of two.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._blocks: list[Tensor] = []
        self._taking: _Task | None = None
        self._copying: _Task | None = None

    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Begins to take the memory for copies of such tensors; returns at once."""
        self.finish()
        self._sizes = [tensor.nbytes for tensor in tensors]
        self._blocks = []  # first give back what there was
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._taking = _Task(lambda: self._take(_block_sizes(self._sizes), lock=on_gpu))

    def of(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Contiguous copies, each a memory of its own to torch.save. The ones before are lost.

        They are made in a thread; `finish`, or the function that is returned, waits for it. Until
        then nothing may change the tensors.

        Raises:
            CheckpointError: there is not enough host memory.
        """
        sizes = [tensor.nbytes for tensor in tensors]
        if self._taking is None or self._taking.error or sizes != self._sizes:
            self.reserve(tensors)
        assert self._taking is not None
        self._taking.wait()
        pairs = []
        for tensor, place in zip(tensors, _places(sizes), strict=True):
            copy = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
            if tensor.numel():
                memory = self._blocks[place.block].numpy()
                copy = torch.frombuffer(
                    memory, dtype=tensor.dtype, count=tensor.numel(), offset=place.start
                ).view(tensor.shape)
            pairs.append((tensor.detach(), copy))
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        made = None if device is None else torch.cuda.current_stream(device).record_event()
        self._copying = task = _Task(lambda: _copy(pairs, device, made))
        return [copy for _, copy in pairs], task.wait

    def finish(self) -> float:
        """Returns when the tensors may change again: the seconds that this took.

        What went wrong, those are told who wait for the copies.
        """
        if self._copying is None:
            return 0.0
        begin = time.monotonic()
        self._copying.join()
        self._copying = None
        return time.monotonic() - begin

    def _take(self, sizes: Sequence[int], *, lock: bool) -> None:
        blocks: list[Tensor] = []
        for size in sizes:
            host_blocks.check_room(size, of=sum(sizes))
            blocks.append(_block(size, lock=lock))
        self._blocks = blocks


class _Task:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="host copy", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for its end."""
        self._thread.join()

    def wait(self) -> None:
        """Waits for its end, and raises what it raised."""
        self.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self._call()
        except (CheckpointError, RuntimeError) as error:
            self.error = error.with_traceback(None)  # it would hold what was taken
        finally:
            del self._call  # with the tensors that it names


def _copy(
    pairs: Sequence[tuple[Tensor, Tensor]],
    device: torch.device | None,
    made: Any,  # noqa: ANN401
) -> None:
    if device is None:
        for tensor, copy in pairs:
            copy.copy_(tensor)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_event(made)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for tensor, copy in pairs:
            copy.copy_(tensor, non_blocking=True)
    stream.synchronize()


def _places(sizes: Sequence[int]) -> list[_Place]:
    """Where copies lie: none in two blocks, which CUDA would refuse."""
    found, block, end = [], 0, 0
    for size in sizes:
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if end and end + padded > _BLOCK:
            block, end = block + 1, 0
        found.append(_Place(block, end))
        end += padded
    return found


def _block_sizes(sizes: Sequence[int]) -> list[int]:
    placed = zip(_places(sizes), sizes, strict=True)
    return [
        max(max(place.start + size for place, size in each), 1)
        for _, each in groupby(placed, key=lambda both: both[0].block)
    ]


def _block(size: int, *, lock: bool) -> Tensor:
    block = host_blocks.touched(size)
    if lock:
        address = block.data_ptr()
        status = int(_cuda().cudaHostRegister(address, size, 0))
        if status:
            raise CheckpointError(
                f"{size / 2**30:.1f} GiB of host memory for a copy of what is to be saved cannot "
                f"be page-locked (CUDA error {status}); ask for more memory"
            )
        weakref.finalize(block, _cuda().cudaHostUnregister, address)
    return block


def _cuda() -> Any:  # noqa: ANN401
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
