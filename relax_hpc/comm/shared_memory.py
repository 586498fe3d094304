"""Memory that one process makes and another one on the same GPU, or the same host, maps.

No file lies around for it, and it is gone with the process that made it, once nobody maps it.
"""

import json
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

_HANDLE = 7
"""Arguments of torch's `rebuild_cuda_tensor` before it are type, shape and device."""
_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class SharedMemory(NamedTuple):
    """[n] uint8 and how others find it."""

    tensor: Tensor
    address: str
    """Text from which `attach` finds it, in a process of the same user."""


def allocate(num_bytes: int, device: torch.device) -> SharedMemory:
    """Makes memory that can be mapped; nothing frees it while this process uses the tensor."""
    if device.type != "cuda":
        file = os.memfd_create("relax-weights")
        os.truncate(file, num_bytes)
        tensor = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
        address = {"path": f"/proc/{os.getpid()}/fd/{file}", "size": num_bytes}
        return SharedMemory(tensor, json.dumps(address))
    # Memory of segments that grow could only be passed on by a call that containers refuse.
    with _fixed_segments():
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    _, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    handle = _to_texts(arguments[_HANDLE:])
    return SharedMemory(tensor, json.dumps({"cuda": handle, "size": num_bytes}))


def attach(address: str, device: torch.device) -> Tensor:
    """Maps what `allocate` made in another process.

    Args:
        address: as it said.
        device: this process's name for the GPU that the memory is of.

    Raises:
        RuntimeError: CUDA cannot map it.
        OSError: the process that made it is gone, or is another user's.
    """
    found = json.loads(address)
    if "path" in found:
        file = os.open(found["path"], os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(file, found["size"]), dtype=torch.uint8)
        finally:
            os.close(file)
    index = torch.cuda.current_device() if device.index is None else device.index
    size = torch.Size([found["size"]])
    # What torch gives away is good in its process only by the device's number there.
    tensor: Tensor = reductions.rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        Tensor,
        size,
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        index,
        *_from_texts(found["cuda"]),
    )
    return tensor


def _to_texts(handle: Iterable[Any]) -> list[Any]:
    return [value.hex() if isinstance(value, bytes) else value for value in handle]


def _from_texts(texts: Iterable[Any]) -> list[Any]:
    return [bytes.fromhex(value) if isinstance(value, str) else value for value in texts]


@contextmanager
def _fixed_segments() -> Iterator[None]:
    """Torch allocates by cudaMalloc inside, whatever the environment says of its segments."""
    own = next((os.environ[name] for name in _SETTINGS if os.environ.get(name)), "")
    if "expandable_segments" not in own:
        yield
        return
    options = [option for option in own.split(",") if "expandable_segments" not in option]
    _set_allocator(",".join([*options, "expandable_segments:False"]))
    try:
        yield
    finally:
        _set_allocator(own)


def _set_allocator(settings: str) -> None:
    """Calls the setter by the name that this version of torch has for it."""
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(settings)
