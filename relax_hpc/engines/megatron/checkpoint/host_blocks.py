"""Host memory that is really there: taken and touched, as far as the node and the job have it."""

import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor

from relax_hpc.errors import CheckpointError

_LEFT_FREE = 2 << 30
"""Bytes that others find free afterwards, or a twentieth of the node's where that is more."""
_CGROUPS = Path("/sys/fs/cgroup")


def check_room(size: int, *, of: int, own: Path = Path("/proc/self/cgroup")) -> None:
    """Refuses to take memory that is not there: the kernel would end this process, or another.

    Args:
        size: bytes of the next block.
        of: bytes of all of them.

    Raises:
        CheckpointError: says how much there is.
    """
    node = psutil.virtual_memory()
    places = [(node.available, max(_LEFT_FREE, node.total // 20))]
    places += [(free, _LEFT_FREE) for free in _left_to_job(own)]
    free, left = min(places, key=lambda place: place[0] - place[1])
    if size + left > free:
        raise CheckpointError(
            f"{of / 2**30:.1f} GiB of host memory for a copy of what is to be saved are not to be "
            f"had: {free / 2**30:.1f} GiB are free, of which {left / 2**30:.0f} are left to "
            "others; ask for more memory (resources.mem)"
        )


def touched(size: int) -> Tensor:
    """[size] bytes whose pages are there, large ones where the kernel has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    block[:: mmap.PAGESIZE].fill_(0)
    return block


def _left_to_job(own: Path) -> Iterator[int]:
    """Yields bytes that each limit of a cgroup above this process leaves; version 2 alone."""
    try:
        line = own.read_text().strip().splitlines()[-1]
    except (OSError, IndexError):
        return
    folder = _CGROUPS / line.split(":", 2)[-1].lstrip("/")
    for each in (folder, *folder.parents):
        if not each.is_relative_to(_CGROUPS):
            return
        try:
            limit = (each / "memory.max").read_text().strip()
            if limit != "max":
                used = int((each / "memory.current").read_text())
                stats = dict(map(str.split, (each / "memory.stat").read_text().splitlines()))
                yield int(limit) - used + int(stats.get("inactive_file", 0))
        except (OSError, ValueError):
            continue
