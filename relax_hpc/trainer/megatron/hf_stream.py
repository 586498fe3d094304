"""Streams a model's weights as full tensors under Hugging Face names, whatever the grid.

It takes a bucket of parameters at a time: their pipeline stage passes its shards on to the other
stages, then ranks of each stage that share matrices gather them. So only one shard per rank crosses
stages, and the gather, mostly within a node, takes as few collectives as there are kinds.

`HfGather` does so again and again, in flat buckets, on rank 0 or on all ranks. If only rank 0 sends
to engines, other ranks need no weights. Every rank packs the parts of a bucket that it alone has
into one message; the receiver copies the pieces into place. The pieces and their places are
computed once: an update is a few kernels per bucket.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from relax_hpc.config.model import FrozenPart, LoraConfig
from relax_hpc.runtime.comm.bucket import BucketPlan, Spec, dtype_name, dtype_of, views
from relax_hpc.runtime.comm.torch_group import all_gather_json
from relax_hpc.trainer.megatron.fit import part_of
from relax_hpc.trainer.megatron.hf_weights import Sharing, by_expert, list_owned
from relax_hpc.trainer.megatron.layers.lora import is_adapted, merge_adapter
from relax_hpc.trainer.megatron.model import PackedGPT
from relax_hpc.trainer.models.names import Adapter, Parameter, Shape, TensorPiece

BUCKET_BYTES = 1 << 28

Shard = list[Tensor]
"""A rank's part of a parameter: one tensor, or one per expert."""
Key = TypeVar("Key", bound=Hashable)


class ParameterSlot(NamedTuple):
    """A parameter, and the ranks' parts of it."""

    parameter: Parameter
    stage: int
    """Pipeline stage that has it; the first, if several do."""
    dtype: torch.dtype
    own: nn.Parameter | None
    """This rank's part; None on the other stages."""
    sharing: Sharing

    @property
    def is_made(self) -> bool:
        """Whether every call of `shard` makes it, by merging an adapter."""
        return self.own is not None and is_adapted(self.own)

    def shard(self) -> Shard:
        """Returns the shard of this rank in use; empty on the other stages."""
        if self.own is None:
            return []
        return by_expert(merge_adapter(self.own), self.parameter, self.sharing.size)

    @property
    def shard_shape(self) -> Shape:
        """Returns [experts of a rank or 1, ...]."""
        experts = (self.parameter.num_experts or 1) // self.sharing.expert_size
        return (experts, *self.parameter.shard_shape(self.sharing.size))

    @property
    def numel(self) -> int:
        return torch.Size(self.shard_shape).numel()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Returns the ranks of a stage whose shards make the whole, if there are several."""
        if self.parameter.num_experts:
            group = mpu.get_expert_tensor_and_model_parallel_group()
        elif self.parameter.layout != "whole":
            group = mpu.get_tensor_model_parallel_group()
        else:
            return None
        return group if group.size() > 1 else None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize * (self.group.size() if self.group else 1)


@torch.no_grad()
def stream_weights(
    chunks: Sequence[PackedGPT],
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yields full tensors under Hugging Face names, in the order of the model, on its device.

    Collective over all ranks that share the model's matrices, layers or experts: each iterates to
    the end and gets every tensor, in the same order on any grid. A tied output matrix is not
    repeated.

    No tensor is written to after it was yielded. A gathered one belongs to the caller. One that is
    wholly this rank's may be a view of the parameter, valid until the weights change. A rank holds
    up to three buckets besides: shards passed on, gathered shards, and a tensor made of them.

    Args:
        bucket_bytes: of whole tensors gathered at a time; a larger parameter is alone.
    """
    device = next(chunks[0].parameters()).device
    for bucket in _buckets(slots_of(chunks), bucket_bytes):
        yield from _brought_together(bucket, device)


def weight_specs(
    chunks: Sequence[PackedGPT],
    frozen: Collection[FrozenPart] = (),
    lora: LoraConfig | None = None,
) -> list[Spec]:
    """Returns the specs of `stream_weights`, in that order. Collective over pipeline stages.

    Args:
        lora: adapters; all else is not trained.
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
    """Whether it is adapted, or a norm among adapted parameters, which is not worth its own
    bucket."""
    is_vector = len(next(iter(parameter.hf.values()))) == 1
    is_beside = is_vector and parameter.core[0].startswith("decoder.")
    return is_beside or Adapter.of(parameter, lora.rank, lora.targets) is not None


def unpack(parameter: Parameter, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that a parameter, or one for all experts, is packed from. Not
    collective."""
    sharing = Sharing(0, 1)
    slot = ParameterSlot(parameter, 0, whole.dtype, None, sharing)
    return _whole(slot, [by_expert(whole, parameter, sharing.size)])


def slots_of(chunks: Sequence[PackedGPT]) -> list[ParameterSlot]:
    """Returns a slot for every parameter, in the model's order. Collective over pipeline stages."""
    parameters = list_owned(chunks, chunks[0].architecture)
    group = mpu.get_pipeline_model_parallel_group()
    # Stages may be cut in ways that only their ranks know.
    mine = [dtype_name(copies[0].dtype) if copies else None for _, copies in parameters]
    stages: list[list[str | None]] = all_gather_json(mine, group)
    slots = []
    for number, (parameter, copies) in enumerate(parameters):
        stage, name = next((n, of[number]) for n, of in enumerate(stages) if of[number])
        assert name
        own = copies[0] if stage == group.rank() else None
        slots.append(ParameterSlot(parameter, stage, dtype_of(name), own, Sharing.of(parameter)))
    return slots


def _buckets(slots: Sequence[ParameterSlot], max_bytes: int) -> Iterator[list[ParameterSlot]]:
    bucket: list[ParameterSlot] = []
    for slot in slots:
        if bucket and sum(other.nbytes for other in bucket) + slot.nbytes > max_bytes:
            yield bucket
            bucket = []
        bucket.append(slot)
    yield bucket


def _brought_together(
    bucket: Sequence[ParameterSlot], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a bucket. A function of its own, so that its locals are freed."""
    shards = _gather(bucket, _pass_on(bucket, device))
    for slot, ranks in zip(bucket, shards, strict=True):
        yield from _whole(slot, ranks)


def _pass_on(bucket: Sequence[ParameterSlot], device: torch.device) -> list[Shard]:
    shards = [slot.shard() for slot in bucket]
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


def _gather(bucket: Sequence[ParameterSlot], shards: Sequence[Shard]) -> list[list[Shard]]:
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
    kinds: dict[Key, list[int]] = {}
    for number, key in enumerate(keys):
        kinds.setdefault(key, []).append(number)
    return kinds


def _flat(shards: Sequence[Shard], numbers: Sequence[int]) -> Tensor:
    tensors = [tensor.flatten() for number in numbers for tensor in shards[number]]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)  # a large one is alone: no copy


def _whole(slot: ParameterSlot, ranks: Sequence[Shard]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that a parameter is packed from.

    Args:
        ranks: shards of the ranks that share it; expert-tensor-parallel ranks of the same experts
            are neighbours.
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
            yield name.format(expert=expert), _join(parts, shape, may_alias=is_own)


def _join(parts: Sequence[tuple[Tensor, TensorPiece]], shape: Shape, *, may_alias: bool) -> Tensor:
    shard, piece = parts[0]
    if may_alias and len(parts) == 1:
        return shard.narrow(piece.dim, piece.target, piece.length)
    whole = shard.new_empty(shape)
    for shard, piece in parts:
        whole.narrow(piece.dim, piece.start, piece.length).copy_(
            shard.narrow(piece.dim, piece.target, piece.length)
        )
    return whole


_ALIGNMENT = 16
"""Bytes; a piece in a message begins at a multiple of it."""


class _Piece(NamedTuple):
    owner: int
    """Global rank; the first of those with the same piece."""
    tensor: int
    """Index in its bucket."""
    dim: int
    start: int
    shape: Shape
    dtype: torch.dtype
    slot: int
    shard: int
    """Index among the owner's shards in that slot."""
    target: int
    """First index in the shard, along dimension `dim`."""

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes that it occupies in a message."""
        return -(-self.size // _ALIGNMENT) * _ALIGNMENT

    def of(self, shards: Mapping[int, Shard]) -> Tensor:
        return shards[self.slot][self.shard].narrow(self.dim, self.target, self.shape[self.dim])

    def within(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[self.tensor].narrow(self.dim, self.start, self.shape[self.dim])


class _Message(NamedTuple):
    """A message of one rank: its own parts of a bucket."""

    owner: int
    pieces: list[_Piece]

    @property
    def nbytes(self) -> int:
        return sum(piece.room for piece in self.pieces)

    def places(self, flat: Tensor) -> list[Tensor]:
        """Returns the pieces as views of the message's bytes."""
        found, start = [], 0
        for piece in self.pieces:
            place = flat[start : start + piece.size]
            found.append(place.view(piece.dtype).view(piece.shape))
            start += piece.room
        return found


class _Copies(NamedTuple):
    """The places in a bucket or a message, and their contents."""

    places: list[Tensor]
    own: Callable[[], list[Tensor]]
    others: list[Tensor]
    received: list[Tensor]

    def make_own(self) -> None:
        if self.places:
            torch._foreach_copy_(self.places, self.own())

    def make_others(self) -> None:
        if self.others:
            torch._foreach_copy_(self.others, self.received)


class HfGather:
    """A rank's end of the gather of buckets."""

    def __init__(
        self, chunks: Sequence[PackedGPT], plan: BucketPlan, *, to_all: bool = False
    ) -> None:
        """Collective.

        Args:
            to_all: whether every rank fills buckets, at the same time; else only rank 0 does.
        """
        self._chunks, self._plan, self._rank = chunks, plan, dist.get_rank()
        self._slots = slots_of(chunks)
        pieces = _pieces(self._slots, _Ranks.all())
        self._messages = [_messages(bucket, pieces) for bucket in plan.buckets]
        owners = {message.owner for messages in self._messages for message in messages}
        self._here = self._rank
        """Rank whose pieces are local: messages of this rank are made of them."""
        if owners == {0}:  # all the others are replicas of it
            self._here, to_all = 0, False
        self._to_all = to_all
        self._regions = [self._room_for(messages) for messages in self._messages]
        self._buffer: Tensor | None = None
        self._addresses = list[int]()
        self._copies: dict[tuple[int, int], _Copies] = {}

    def begin(self) -> None:
        """Starts a version; call it before every one."""
        parameters = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        addresses = [parameter.data_ptr() for parameter in parameters]
        if addresses != self._addresses:
            self._addresses, self._copies = addresses, {}
        if self._buffer is None:
            device = parameters[0].device
            size = max(r.stop for regions in self._regions for r in [slice(0), *regions.values()])
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def fill(self, index: int, flat: Tensor) -> None:
        """Puts bucket `index` into `flat`, in the order of the current stream.

        Goes bucket by bucket, in step with the other ranks, which also fill or `give`. May pause
        between two buckets, as long as the rest follows. A bucket may be left out if all leave it
        out.
        """
        messages = self._messages[index]
        own = [message for message in messages if message.owner == self._here]
        others = [message for message in messages if message.owner != self._here]
        if (key := (index, flat.data_ptr())) not in self._copies:
            tensors = views(flat, self._plan.buckets[index])
            self._copies[key] = _Copies(
                [piece.within(tensors) for message in own for piece in message.pieces],
                self._values([piece for message in own for piece in message.pieces]),
                [piece.within(tensors) for message in others for piece in message.pieces],
                [
                    place
                    for message in others
                    for place in message.places(self._region(index, message))
                ],
            )
        copies, works = self._copies[key], []
        if self._to_all:
            for message in own:
                self._pack(index, message)
            works = [
                dist.broadcast(self._region(index, message), message.owner, async_op=True)
                for message in messages
            ]
        elif others:
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, self._region(index, m), m.owner) for m in others]
            )
        copies.make_own()
        for work in works:
            work.wait()
        copies.make_others()

    @torch.no_grad()
    def give(self, skipped: Collection[int] = ()) -> None:
        """Sends rank 0 the missing parts of the other buckets. For other ranks, unless `to_all`."""
        for index, messages in enumerate(self._messages):
            for message in messages:
                if message.owner == self._rank and index not in skipped:
                    region = self._pack(index, message)
                    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, region, 0)]):
                        work.wait()

    def _pack(self, index: int, message: _Message) -> Tensor:
        region = self._region(index, message)
        if (key := (index, 0)) not in self._copies:
            values = self._values(message.pieces)
            self._copies[key] = _Copies(message.places(region), values, [], [])
        self._copies[key].make_own()
        return region

    def _values(self, pieces: Sequence[_Piece]) -> Callable[[], list[Tensor]]:
        """Returns a function that returns the pieces: views, or parts of matrices made on each
        call."""
        slots = sorted({piece.slot for piece in pieces})

        def values() -> list[Tensor]:
            shards = {slot: self._slots[slot].shard() for slot in slots}
            return [piece.of(shards) for piece in pieces]

        if any(self._slots[slot].is_made for slot in slots):
            return values
        views_of_weights = values()
        return lambda: views_of_weights

    def _room_for(self, messages: Sequence[_Message]) -> dict[int, slice]:
        """Returns owner -> where in the buffer a message is packed, or received."""
        regions, start = {}, 0
        for message in messages:
            is_own = message.owner == self._rank
            if self._to_all or is_own != (self._rank == 0):
                regions[message.owner] = slice(start, start + message.nbytes)
                start += message.nbytes
        return regions

    def _region(self, index: int, message: _Message) -> Tensor:
        assert self._buffer is not None, "begin was not called"
        return self._buffer[self._regions[index][message.owner]]


class _Ranks(NamedTuple):
    """The ranks by their place in the grid."""

    dense: dict[tuple[int, int], int]
    """(stage, tensor-parallel rank) -> the first such rank."""
    expert: dict[tuple[int, int, int], int]
    """(stage, expert-parallel rank, expert-tensor-parallel rank) -> the first such rank."""

    @classmethod
    def all(cls) -> "_Ranks":
        stage = mpu.get_pipeline_model_parallel_rank()
        dense = stage, mpu.get_tensor_model_parallel_rank()
        expert = (
            stage,
            mpu.get_expert_model_parallel_rank(),
            mpu.get_expert_tensor_parallel_rank(),
        )
        ranks = cls({}, {})
        for rank, (of_dense, of_expert) in enumerate(all_gather_json((dense, expert))):
            ranks.dense.setdefault(tuple(of_dense), rank)
            ranks.expert.setdefault(tuple(of_expert), rank)
        return ranks


def _messages(bucket: Sequence[Spec], pieces: Iterator[list[_Piece]]) -> list[_Message]:
    by_owner: dict[int, list[_Piece]] = {}
    for number in range(len(bucket)):
        for piece in next(pieces):
            by_owner.setdefault(piece.owner, []).append(piece._replace(tensor=number))
    return [_Message(owner, by_owner[owner]) for owner in sorted(by_owner)]


def _pieces(slots: Sequence[ParameterSlot], ranks: _Ranks) -> Iterator[list[_Piece]]:
    """Yields the pieces of every tensor, in the order of `stream_weights`."""
    for number, slot in enumerate(slots):
        for expert in range(slot.parameter.num_experts or 1):
            pieces = list(_pieces_of(slot, number, expert, ranks))
            for source in range(len(slot.parameter.hf)):
                yield [piece for of, piece in pieces if of == source]


def _pieces_of(
    slot: ParameterSlot, number: int, expert: int, ranks: _Ranks
) -> Iterator[tuple[int, _Piece]]:
    parameter, size, (per_rank, *rest) = slot.parameter, slot.sharing.size, slot.shard_shape
    for part in range(1 if parameter.layout == "whole" else size):
        if parameter.num_experts:
            owner = ranks.expert[slot.stage, expert // per_rank, part]
        else:
            owner = ranks.dense[slot.stage, part]
        for piece in parameter.pieces(part, size):
            shape = (*rest[: piece.dim], piece.length, *rest[piece.dim + 1 :])
            yield (
                piece.source,
                _Piece(
                    owner, 0, piece.dim, piece.start, shape, slot.dtype,
                    number, expert % per_rank, piece.target,
                ),
            )  # fmt: skip
