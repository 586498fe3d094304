"""A model's weights as one stream of full tensors under Hugging Face names, whatever the grid.

A bucket of parameters at a time: their pipeline stage passes its shards on to the other stages,
then ranks of each stage that share matrices gather them. So what crosses stages is one shard per
rank, and what is gathered, mostly within a node, comes in as few collectives as there are kinds.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from relax_hpc.comm.bucket import Spec, dtype_name, dtype_of
from relax_hpc.comm.collectives import all_gather_json
from relax_hpc.config.layout import FrozenPart
from relax_hpc.config.model import LoraConfig
from relax_hpc.engines.megatron.hf.hf_weights import Sharing, by_expert, owned
from relax_hpc.engines.megatron.layers.lora import is_adapted, merged
from relax_hpc.engines.megatron.model import PackedGPT
from relax_hpc.engines.megatron.parts import part_of
from relax_hpc.models.names import Adapter, Parameter, Piece, Shape

BUCKET_BYTES = 1 << 28

Shard = list[Tensor]
"""A rank's part of a parameter: one tensor, or one for each expert where there are experts."""
Key = TypeVar("Key", bound=Hashable)


class Slot(NamedTuple):
    """A parameter, and the ranks' parts of it."""

    parameter: Parameter
    stage: int
    """Pipeline stage that has it; the first, if several do."""
    dtype: torch.dtype
    own: Callable[[], Tensor] | None
    """Makes this rank's part; None on the other stages."""
    sharing: Sharing

    @property
    def shard(self) -> Shard:
        """Shard of this rank, made by every call; empty on the other stages."""
        own = self.own
        return [] if own is None else by_expert(own(), self.parameter, self.sharing.size)

    @property
    def shard_shape(self) -> Shape:
        """[experts of a rank or 1, ...]."""
        experts = (self.parameter.num_experts or 1) // self.sharing.expert_size
        return (experts, *self.parameter.shard_shape(self.sharing.size))

    @property
    def numel(self) -> int:
        """Elements of a shard."""
        return torch.Size(self.shard_shape).numel()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Ranks of a stage whose shards make the whole, if there are several."""
        if self.parameter.num_experts:
            group = mpu.get_expert_tensor_and_model_parallel_group()
        elif self.parameter.layout != "whole":
            group = mpu.get_tensor_model_parallel_group()
        else:
            return None
        return group if group.size() > 1 else None

    @property
    def nbytes(self) -> int:
        """Size of the whole parameter."""
        return self.numel * self.dtype.itemsize * (self.group.size() if self.group else 1)


@torch.no_grad()
def named_weights(
    chunks: Sequence[PackedGPT],
    *,
    value_of: Callable[[nn.Parameter], Tensor] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors under Hugging Face names, in the order of the model, on its device.

    Collective over all ranks that share the model's matrices, layers or experts: each iterates to
    the end and is given every tensor, in the same order on any grid. A tied output matrix is not
    repeated.

    No tensor is written to after it was yielded. One that had to be brought together is the
    caller's to keep; one that is all this rank's own may be a view of the parameter, which is good
    until the weights change. Besides what was yielded a rank holds up to three buckets: what it was
    passed, what was gathered, and a tensor made of it.

    Args:
        chunks: this rank's.
        value_of: what is exported of a parameter, of its shape; `main_grad`, for example. By
            default what the model computes with, adapters included.
        bucket_bytes: of whole tensors that are gathered at a time; a larger parameter is alone.
    """
    device = next(chunks[0].parameters()).device
    slots = slots_of(chunks, value_of)
    for bucket in _buckets(slots, bucket_bytes):
        yield from _brought_together(bucket, device)


def weight_specs(
    chunks: Sequence[PackedGPT],
    frozen: Collection[FrozenPart] = (),
    lora: LoraConfig | None = None,
) -> list[Spec]:
    """Returns the specs of `named_weights`, in that order. Collective over pipeline stages.

    Args:
        chunks: this rank's.
        frozen: parts that do not learn.
        lora: what the model is adapted by; all else does not learn.
    """
    return [
        Spec(
            name.format(expert=expert),
            slot.dtype,
            tuple(shape),
            learns=part_of(slot.parameter.core[0]) not in frozen
            and (lora is None or _may_change(slot.parameter, lora)),
        )
        for slot in slots_of(chunks)
        for expert in range(slot.parameter.num_experts or 1)
        for name, shape in slot.parameter.hf.items()
    ]


def _may_change(parameter: Parameter, lora: LoraConfig) -> bool:
    """Whether it is adapted, or a norm among what is, which is not worth a bucket of its own."""
    is_vector = len(next(iter(parameter.hf.values()))) == 1
    is_beside = is_vector and parameter.core[0].startswith("decoder.")
    return is_beside or Adapter.of(parameter, lora.rank, lora.targets) is not None


class OwnShard(NamedTuple):
    """This rank's part of a parameter; none of it if it is on another stage."""

    parameter: Parameter
    own: nn.Parameter | None

    @property
    def is_made(self) -> bool:
        """Whether it is made by every call of `shard`, of a matrix and its adapter."""
        return self.own is not None and is_adapted(self.own)

    def shard(self) -> Shard:
        if self.own is None:
            return []
        return by_expert(merged(self.own), self.parameter, Sharing.of(self.parameter).size)


def own_shards(chunks: Sequence[PackedGPT]) -> list[OwnShard]:
    """Returns this rank's part of every parameter, in the order of `named_weights`."""
    return [
        OwnShard(parameter, copies[0] if copies else None)
        for parameter, copies in owned(chunks, chunks[0].architecture)
    ]


def unpacked(parameter: Parameter, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a parameter, or one for all experts, is packed from. Not collective."""
    sharing = Sharing(0, 1)
    slot = Slot(parameter, 0, whole.dtype, None, sharing)
    return _whole(slot, [by_expert(whole, parameter, sharing.size)])


def slots_of(
    chunks: Sequence[PackedGPT],
    value_of: Callable[[nn.Parameter], Tensor] | None = None,
) -> list[Slot]:
    """Returns a slot for every parameter, in the model's order. Collective over pipeline stages."""
    parameters = owned(chunks, chunks[0].architecture)
    group = mpu.get_pipeline_model_parallel_group()
    of = value_of or nn.Parameter.detach  # what is made with an adapter has the same type
    # Stages may be cut in ways that only their ranks know.
    mine = [dtype_name(of(copies[0]).dtype) if copies else None for _, copies in parameters]
    stages: list[list[str | None]] = all_gather_json(mine, group)
    slots = []
    for number, (parameter, copies) in enumerate(parameters):
        stage, name = next((n, of[number]) for n, of in enumerate(stages) if of[number])
        assert name
        own = partial(value_of or merged, copies[0]) if stage == group.rank() else None
        slots.append(Slot(parameter, stage, dtype_of(name), own, Sharing.of(parameter)))
    return slots


def _buckets(slots: Sequence[Slot], max_bytes: int) -> Iterator[list[Slot]]:
    bucket: list[Slot] = []
    for slot in slots:
        if bucket and sum(other.nbytes for other in bucket) + slot.nbytes > max_bytes:
            yield bucket
            bucket = []
        bucket.append(slot)
    yield bucket


def _brought_together(bucket: Sequence[Slot], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket. In a function of its own, so that nothing of it outlives it."""
    shards = _gather(bucket, _pass_on(bucket, device))
    for slot, ranks in zip(bucket, shards, strict=True):
        yield from _whole(slot, ranks)


def _pass_on(bucket: Sequence[Slot], device: torch.device) -> list[Shard]:
    """Every slot's shard, on all stages."""
    shards = [slot.shard for slot in bucket]
    group = mpu.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return shards
    kinds = _kinds([(slot.stage, slot.dtype) for slot in bucket])
    for (stage, dtype), numbers in kinds.items():
        sizes = [bucket[number].numel for number in numbers]
        if stage == group.rank():
            dist.broadcast(_flat(shards, numbers), group=group, group_src=stage)
            continue
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        dist.broadcast(flat, group=group, group_src=stage)
        for number, part in zip(numbers, torch.split(flat, sizes), strict=True):
            shards[number] = list(part.view(bucket[number].shard_shape))
    return shards


def _gather(bucket: Sequence[Slot], shards: Sequence[Shard]) -> list[list[Shard]]:
    """Every slot's shards of all ranks that share it, by their rank."""
    gathered = [[shard] for shard in shards]
    for (group, dtype), numbers in _kinds([(slot.group, slot.dtype) for slot in bucket]).items():
        if group is None:
            continue
        flat = _flat(shards, numbers)
        ranks = torch.empty(group.size() * len(flat), dtype=dtype, device=flat.device)
        dist.all_gather_into_tensor(ranks, flat, group=group)
        sizes = [bucket[number].numel for number in numbers]
        for number, parts in zip(
            numbers, torch.split(ranks.view(group.size(), -1), sizes, dim=1), strict=True
        ):
            shape = bucket[number].shard_shape
            gathered[number] = [list(part.view(shape)) for part in parts]
    return gathered


def _kinds(keys: Sequence[Key]) -> dict[Key, list[int]]:
    """Key -> where it is found."""
    kinds: dict[Key, list[int]] = {}
    for number, key in enumerate(keys):
        kinds.setdefault(key, []).append(number)
    return kinds


def _flat(shards: Sequence[Shard], numbers: Sequence[int]) -> Tensor:
    tensors = [tensor.flatten() for number in numbers for tensor in shards[number]]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)  # a large one is alone: no copy


def _whole(slot: Slot, ranks: Sequence[Shard]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a parameter is packed from.

    Args:
        ranks: shards of those who share it, expert-tensor-parallel ranks of the same experts side
            by side.
    """
    size, per_rank = slot.sharing.size, slot.shard_shape[0]
    is_own = slot.own is not None and slot.group is None
    for expert in range(slot.parameter.num_experts or 1):
        holders = ranks[expert // per_rank * size :][:size]
        placed = [
            (holder[expert % per_rank], piece)
            for rank, holder in enumerate(holders)
            for piece in slot.parameter.pieces(rank, size)
        ]
        for source, (name, shape) in enumerate(slot.parameter.hf.items()):
            parts = [(shard, piece) for shard, piece in placed if piece.source == source]
            yield name.format(expert=expert), _joined(parts, shape, may_alias=is_own)


def _joined(parts: Sequence[tuple[Tensor, Piece]], shape: Shape, *, may_alias: bool) -> Tensor:
    shard, piece = parts[0]
    if may_alias and len(parts) == 1:
        return shard.narrow(piece.dim, piece.target, piece.length)
    whole = shard.new_empty(shape)
    for shard, piece in parts:
        whole.narrow(piece.dim, piece.start, piece.length).copy_(
            shard.narrow(piece.dim, piece.target, piece.length)
        )
    return whole
