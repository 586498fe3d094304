"""Further sets of weights for one model, in host memory, which it takes turns to hold.

Megatron's DDP keeps the parameters of a chunk in a few flat buffers: those are copied, whatever
the layout. Replicas hold the same, so each of them keeps a part and they gather the whole. What
the optimizer has beside the parameters is not touched.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

_PIECE_BYTES = 1 << 28
"""Torch rounds pinned memory up to a power of two: many pieces waste less than one."""


class _Buffer(NamedTuple):
    """A flat tensor of the model, and who holds the same."""

    whole: Tensor
    mine: Tensor
    """The part of it that this rank keeps; a view."""
    replicas: dist.ProcessGroup | None

    @property
    def pieces(self) -> Sequence[Tensor]:
        return torch.split(self.mine, _PIECE_BYTES // self.mine.element_size())


class WeightBank:
    """Named sets of weights of one rank. All methods are collective.

    A set costs, per replica, the bytes of its weights in host memory, once for all replicas. While
    it is swapped in, the model's own weights are there, too: copied out once per version, and back
    in every time.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._chunks = chunks
        self._buffers = [buffer for chunk in chunks for buffer in _buffers(chunk)]
        self._sets: dict[str, list[Tensor]] = {}
        self._own: list[Tensor] | None = None
        self._own_version: int | None = None
        self._is_lent = False

    @property
    def chunks(self) -> list[GPTModel]:
        """The model."""
        return [chunk.module for chunk in self._chunks]

    @property
    def nbytes(self) -> int:
        """Host memory of this rank."""
        sets = [*self._sets.values(), self._own or []]
        return sum(piece.nbytes for pieces in sets for piece in pieces)

    def keep(self, name: str) -> None:
        """Copies what the model holds now; a set of that name is replaced."""
        self._sets[name] = self._copy_out(self._sets.get(name))

    @contextmanager
    def swapped(self, name: str, *, version: int | None = None) -> Iterator[None]:
        """The model holds the set `name` inside, and its own weights again afterwards, bitwise.

        Args:
            name: of a set that was kept.
            version: of the own weights; they are not copied out again while it stays the same.
        """
        kept = self._sets[name]
        with self.lent(version=version):
            self._copy_in(kept)
            yield

    @contextmanager
    def lent(self, *, version: int | None = None) -> Iterator[None]:
        """The model may be given any weights inside; its own ones come back, bitwise.

        After an error inside they come back, too, if all replicas leave.

        Args:
            version: see `swapped`.
        """
        assert not self._is_lent, "the model's own weights are out already"
        if self._own is None or version is None or version != self._own_version:
            self._own_version = None
            self._own = self._copy_out(self._own)
            self._own_version = version
        self._is_lent = True
        try:
            yield
        finally:
            self._is_lent = False
            self._copy_in(self._own)

    def forget_own(self) -> None:
        """The model's own weights have changed, and their version has not."""
        self._own_version = None

    @torch.no_grad()
    def _copy_out(self, old: list[Tensor] | None) -> list[Tensor]:
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:  # replicas may not be equal yet
                chunk.start_param_sync(force_sync=True)
        pieces = [piece for buffer in self._buffers for piece in buffer.pieces]
        if old is None:
            old = [torch.empty_like(p, device="cpu", pin_memory=p.is_cuda) for p in pieces]
        for host, piece in zip(old, pieces, strict=True):
            host.copy_(piece, non_blocking=True)
        return old

    @torch.no_grad()
    def _copy_in(self, kept: list[Tensor]) -> None:
        copies = iter(kept)
        for buffer in self._buffers:
            for piece in buffer.pieces:
                piece.copy_(next(copies), non_blocking=True)
            if buffer.replicas is not None:
                dist.all_gather_into_tensor(buffer.whole, buffer.mine, group=buffer.replicas)


def _buffers(chunk: DistributedDataParallel) -> Iterator[_Buffer]:
    """All weights of a chunk: parameters, dense and of experts, then what is no parameter."""
    for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
        group = buffer.data_parallel_group
        if group.size() == 1:
            yield _Buffer(buffer.param_data, buffer.param_data, None)
        else:
            mine = buffer.param_data.chunk(group.size())[group.rank()]
            yield _Buffer(buffer.param_data, mine, group)
    for module in chunk.module.modules():
        for name, value in module._buffers.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                yield _Buffer(value.view(-1), value.view(-1), None)
