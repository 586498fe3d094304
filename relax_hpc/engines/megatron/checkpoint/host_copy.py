"""Copies of tensors in host memory that stays: what is written while training goes on."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relax_hpc.errors import CheckpointError

_ALIGNMENT = 64


class HostCopy:
    """One block of memory, for one set of copies at a time.

    For tensors of a GPU its pages are locked, so that the GPU writes into it at the speed of the
    bus. Torch's own pinned memory would round the block up to a power of two.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous copies, each a memory of its own to torch.save. The ones before are lost.

        Raises:
            CheckpointError: there is not enough host memory.
        """
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if size > len(self._block):
            self._grow(size, lock=on_gpu)
        memory = self._block.numpy()
        copies = []
        for tensor, start in zip(tensors, starts, strict=True):
            if tensor.numel():
                copy = torch.frombuffer(
                    memory, dtype=tensor.dtype, count=tensor.numel(), offset=start
                ).view(tensor.shape)
                copies.append(copy.copy_(tensor.detach(), non_blocking=True))
            else:
                copies.append(torch.empty_like(tensor, device="cpu"))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def _grow(self, size: int, *, lock: bool) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)  # first give back what there was
        try:
            self._block = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise _too_little(size) from error
        if lock:
            address = self._block.data_ptr()
            status = int(_cuda().cudaHostRegister(address, size, 0))
            if status:
                self._block = torch.empty(0, dtype=torch.uint8)
                raise _too_little(size, f" (CUDA error {status})")
            weakref.finalize(self._block, _cuda().cudaHostUnregister, address)


def _cuda() -> Any:  # noqa: ANN401
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _too_little(size: int, why: str = "") -> CheckpointError:
    return CheckpointError(
        f"{size / 2**30:.1f} GiB of host memory for a copy of what is to be saved are not to be "
        f"had{why}; ask for more memory"
    )
