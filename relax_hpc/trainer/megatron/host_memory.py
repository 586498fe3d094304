"""Keeps tensors in host memory: streams them through the device in pieces, and copies what is to be
saved.

Copies for a checkpoint are written while training continues. Their memory is taken and touched in
advance, as far as the node and the job have it.
"""

import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from relax_hpc.errors import CheckpointError, ConfigError

_SLOTS = 3
"""One piece comes in, one is changed, one goes out: both directions of the bus are busy."""


class HostMemory:
    """One block of page-locked memory to take tensors from.

    Torch's own pinned allocator rounds every block up to a power of two.
    """

    ALIGNMENT = 64

    def __init__(
        self, num_bytes: int, device: torch.device, setting: str = "actor.optimizer.offload"
    ) -> None:
        """Locks the pages if `device` is a GPU, whose copies then do not wait for the CPU.

        Raises:
            ConfigError: they cannot be locked.
        """
        self._block = torch.empty(num_bytes, dtype=torch.uint8)
        self._used = 0
        if device.type == "cuda" and (status := _lock(self._block)):
            raise ConfigError(
                f"{setting}: {num_bytes / 2**30:.1f} GiB of host memory cannot "
                f"be page-locked (CUDA error {status}); ask for more memory, or have less there"
            )

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Returns [count] uninitialised elements; freed with the block."""
        num_bytes = count * dtype.itemsize
        taken = self._block[self._used : self._used + num_bytes].view(dtype)
        self._used += -(-num_bytes // self.ALIGNMENT) * self.ALIGNMENT
        return taken


def _lock(block: Tensor) -> int:
    """Locks the pages of a block until it is freed; returns CUDA's error, 0 if none."""
    address = block.data_ptr()
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(runtime.cudaHostRegister(address, block.nbytes, 0))
    if not status:
        weakref.finalize(block, runtime.cudaHostUnregister, address)
    return status


def stream(
    pieces: Sequence[Sequence[Tensor]],
    device: torch.device,
    change: Callable[[int, list[Tensor]], None],
) -> None:
    """Copies every piece to the device, changes it there in place, and copies it back.

    Returns when all of it is back in host memory.

    Args:
        pieces: contiguous tensors in host memory; page-locked, or the copies wait for each other.
        change: (index of the piece, its tensors on the device).
    """
    size = max(sum(_pad(tensor) for tensor in piece) for piece in pieces)
    incoming, here, outgoing = (_Lane(stream) for stream in _streams(device))
    incoming.wait(here.mark())
    slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_SLOTS)]
    free: list[Any] = [None] * _SLOTS
    for number, piece in enumerate(pieces):
        near = _carve(slots[number % _SLOTS], piece)
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


def _carve(slot: Tensor, piece: Sequence[Tensor]) -> list[Tensor]:
    carved, used = [], 0
    for tensor in piece:
        carved.append(slot[used : used + tensor.nbytes].view(tensor.dtype))
        used += _pad(tensor)
    return carved


def _pad(tensor: Tensor) -> int:
    return -(-tensor.nbytes // HostMemory.ALIGNMENT) * HostMemory.ALIGNMENT


_LEFT_FREE = 2 << 30
"""Bytes left free for other processes, or a twentieth of the node's memory if that is more."""
_CGROUPS = Path("/sys/fs/cgroup")


def check_room(size: int, *, of: int, own: Path = Path("/proc/self/cgroup")) -> None:
    """Checks that memory is available: otherwise the kernel would kill this process, or another.

    Args:
        size: bytes of the next block.
        of: bytes of all blocks.

    Raises:
        CheckpointError: has the available size.
    """
    node = psutil.virtual_memory()
    places = [(node.available, max(_LEFT_FREE, node.total // 20))]
    places += [(free, _LEFT_FREE) for free in _read_memory_left(own)]
    free, left = min(places, key=lambda place: place[0] - place[1])
    if size + left > free:
        raise CheckpointError(
            f"{of / 2**30:.1f} GiB of host memory for a copy of what is to be saved are not to be "
            f"had: {free / 2**30:.1f} GiB are free, of which {left / 2**30:.0f} are left to "
            "others; ask for more memory (resources.mem)"
        )


def allocate(size: int) -> Tensor:
    """Returns [size] bytes with resident pages, large ones if possible."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    block[:: mmap.PAGESIZE].fill_(0)
    return block


def _read_memory_left(own: Path) -> Iterator[int]:
    """Yields bytes that each limit of a cgroup above this process leaves; version 2 only."""
    try:
        line = own.read_text(encoding="utf-8").strip().splitlines()[-1]
    except (OSError, IndexError):
        return
    folder = _CGROUPS / line.split(":", 2)[-1].lstrip("/")
    for each in (folder, *folder.parents):
        if not each.is_relative_to(_CGROUPS):
            return
        try:
            limit = (each / "memory.max").read_text(encoding="utf-8").strip()
            if limit != "max":
                used = int((each / "memory.current").read_text(encoding="utf-8"))
                stats = dict(
                    map(str.split, (each / "memory.stat").read_text(encoding="utf-8").splitlines())
                )
                yield int(limit) - used + int(stats.get("inactive_file", 0))
        except (OSError, ValueError):
            continue


_ALIGNMENT = 64
_BLOCK = 1 << 30
"""Bytes locked at once: locking blocks CUDA calls."""


class _CopyPlace(NamedTuple):
    block: int
    start: int
    """Byte of the block."""


class HostCopy:
    """Blocks of memory, for one set of copies at a time.

    They are taken in the background, once the size is known. For GPU tensors the pages are locked,
    so that the GPU copies at the speed of the bus. Torch's own pinned memory would round them up to
    a power of two.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._blocks: list[Tensor] = []
        self._taking: _CallThread | None = None
        self._copying: _CallThread | None = None

    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Begins to take the memory for copies of such tensors; returns at once."""
        self.finish()
        self._sizes = [tensor.nbytes for tensor in tensors]
        self._blocks = []  # first give back what there was
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._taking = _CallThread(lambda: self._take(_block_sizes(self._sizes), lock=on_gpu))

    def of(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Returns contiguous copies, each its own storage for torch.save, and a wait for them.
        Earlier copies are lost.

        A thread makes them; `finish`, or the returned function, waits for it. Nothing may change
        the tensors before that.

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
        self._copying = task = _CallThread(lambda: _copy(pairs, device, made))
        return [copy for _, copy in pairs], task.wait

    def finish(self) -> float:
        """Waits until the tensors may change again; returns the seconds.

        Errors go to those who wait for the copies.
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
            check_room(size, of=sum(sizes))
            blocks.append(_block(size, lock=lock))
        self._blocks = blocks


class _CallThread:
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="host copy", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def wait(self) -> None:
        """Waits for its end, and raises its error."""
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


def _places(sizes: Sequence[int]) -> list[_CopyPlace]:
    """Returns the places of copies: none spans two blocks, which CUDA would refuse."""
    found, block, end = [], 0, 0
    for size in sizes:
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if end and end + padded > _BLOCK:
            block, end = block + 1, 0
        found.append(_CopyPlace(block, end))
        end += padded
    return found


def _block_sizes(sizes: Sequence[int]) -> list[int]:
    placed = zip(_places(sizes), sizes, strict=True)
    return [
        max(max(place.start + size for place, size in each), 1)
        for _, each in groupby(placed, key=lambda both: both[0].block)
    ]


def _block(size: int, *, lock: bool) -> Tensor:
    block = allocate(size)
    if lock and (status := _lock(block)):
        raise CheckpointError(
            f"{size / 2**30:.1f} GiB of host memory for a copy of what is to be saved cannot "
            f"be page-locked (CUDA error {status}); ask for more memory"
        )
    return block
