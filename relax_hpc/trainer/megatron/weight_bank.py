"""Keeps further sets of weights for one model in host memory, and swaps them in.

Megatron's DDP keeps the parameters of a chunk in a few flat buffers: these are copied, whatever the
layout. Replicas hold the same, so each of them keeps a part and they gather the whole. Optimizer
state is not touched.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from relax_hpc.trainer.megatron.host_memory import HostMemory

_SETTING = 'reference.placement = "actor"'


class KeptPart(NamedTuple):
    """A rank's part of a kept parameter, or of a kept buffer of a module."""

    start: int
    """First element within the parameter."""
    values: Tensor
    """[n] in host memory; constant."""


class _Buffer(NamedTuple):
    """A flat tensor of the model, and the ranks with the same."""

    whole: Tensor
    first: int
    """First element of `whole` that this rank keeps."""
    mine: Tensor
    """The part that it keeps; a view of `whole`."""
    replicas: dist.ProcessGroup | None
    places: dict[Tensor, int]
    """First element of each parameter in `whole`."""


class _Set(NamedTuple):
    memory: HostMemory
    parts: list[Tensor]
    """This rank's part of every buffer."""


class WeightBank:
    """Named sets of weights of one rank. All methods but `get_part` are collective.

    A set costs, per replica, the bytes of its weights in host memory, once for all replicas. While
    it is swapped in, the model's own weights are there, too: copied out once per version, and back
    in every time.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._chunks = chunks
        self._buffers = [buffer for chunk in chunks for buffer in _buffers(chunk)]
        self._sets: dict[str, _Set] = {}
        self._own: _Set | None = None
        self._own_version: int | None = None
        self._is_lent = False
        self.lasting: set[str] = set()
        """Sets that checkpoints have to hold, because nothing else does."""

    @property
    def chunks(self) -> list[GPTModel]:
        return [chunk.module for chunk in self._chunks]

    @property
    def nbytes(self) -> int:
        sets = [*self._sets.values(), *([self._own] if self._own else [])]
        return sum(part.nbytes for each in sets for part in each.parts)

    def keep(self, name: str, *, lasting: bool = False) -> None:
        """Copies the model's current weights; replaces a set of that name.

        Args:
            lasting: whether checkpoints save and restore it.

        Raises:
            ConfigError: there is not enough host memory.
        """
        # In memory of its own: what was kept before may still be on its way to a checkpoint.
        self._sets[name] = self._copy_out(None)
        if lasting:
            self.lasting.add(name)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def get_part(self, name: str) -> dict[Tensor, KeptPart]:
        """Returns this rank's part of a set, by parameters and module buffers.

        Data-parallel ranks share a parameter, and all keep the module buffers.
        """
        found = {}
        for buffer, part in zip(self._buffers, self._sets[name].parts, strict=True):
            for parameter, place in buffer.places.items():
                begin = max(place, buffer.first)
                end = min(place + parameter.numel(), buffer.first + len(part))
                if begin < end:
                    values = part[begin - buffer.first : end - buffer.first]
                    found[parameter] = KeptPart(begin - place, values)
        return found

    @contextmanager
    def swap(self, name: str, *, version: int | None = None) -> Iterator[None]:
        """Swaps the set `name` in for the block; the model's own weights come back bitwise.

        Args:
            version: of the own weights; they are not copied out again while it stays the same.
        """
        kept = self._sets[name]
        with self.lent(version=version):
            self._copy_in(kept)
            yield

    @contextmanager
    def lent(self, *, version: int | None = None) -> Iterator[None]:
        """Lets the block set any weights; the model's own weights come back bitwise.

        They also come back after an error, if all replicas leave the block.

        Args:
            version: see `swap`.
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
        """Forgets the copy of the model's own weights: they changed under the same version."""
        self._own_version = None

    @torch.no_grad()
    def _copy_out(self, into: _Set | None) -> _Set:
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:  # replicas may not be equal yet
                chunk.start_param_sync(force_sync=True)
        copies = into or self._make_set()
        for part, buffer in zip(copies.parts, self._buffers, strict=True):
            part.copy_(buffer.mine, non_blocking=True)
        return copies

    def _make_set(self) -> _Set:
        parts = [buffer.mine for buffer in self._buffers]
        num_bytes = sum(part.nbytes + HostMemory.ALIGNMENT for part in parts)
        memory = HostMemory(num_bytes, parts[0].device, _SETTING)
        return _Set(memory, [memory.take(part.numel(), part.dtype) for part in parts])

    @torch.no_grad()
    def _copy_in(self, kept: _Set) -> None:
        for buffer, part in zip(self._buffers, kept.parts, strict=True):
            buffer.mine.copy_(part, non_blocking=True)
            if buffer.replicas is not None:
                dist.all_gather_into_tensor(buffer.whole, buffer.mine, group=buffer.replicas)


def _buffers(chunk: DistributedDataParallel) -> Iterator[_Buffer]:
    """Yields all weights of a chunk: parameters, dense and of experts, then the others."""
    for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
        places = {parameter: place for parameter, (place, *_) in buffer.param_index_map.items()}
        group, data = buffer.data_parallel_group, buffer.param_data
        if group.size() == 1:
            yield _Buffer(data, 0, data, None, places)
        else:
            size = data.numel() // group.size()
            first = group.rank() * size
            yield _Buffer(data, first, data[first : first + size], group, places)
    learning = {p for b in [*chunk.buffers, *chunk.expert_parallel_buffers]
                for p in b.param_index_map}  # fmt: skip
    for parameter in chunk.module.parameters():
        if parameter not in learning:  # frozen
            flat = parameter.detach().view(-1)
            yield _Buffer(flat, 0, flat, None, {parameter: 0})
    for module in chunk.module.modules():
        for name, value in module._buffers.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                yield _Buffer(value.view(-1), 0, value.view(-1), None, {value: 0})
