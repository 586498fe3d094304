"""A model's weights as flat buckets, on rank 0 or on all ranks: `hf_stream`, for many updates.

Where only rank 0 sends to engines, nobody else has to be given anything. Every rank packs what it
alone has of a bucket into one message; whoever gets it puts the pieces where they belong. Which
pieces these are, and where they go, is found once: an update is a few kernels per bucket.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from relax_hpc.comm.bucket import BucketPlan, Spec, views
from relax_hpc.comm.collectives import all_gather_json
from relax_hpc.engines.megatron.hf.hf_stream import (
    OwnShard,
    Shard,
    Slot,
    own_shards,
    slots_of,
)
from relax_hpc.engines.megatron.model import PackedGPT
from relax_hpc.models.names import Shape

_ALIGNMENT = 16
"""Bytes; a piece in a message begins at a multiple of it."""


class _Piece(NamedTuple):
    """A piece of a tensor, as one rank has it."""

    owner: int
    """Global rank; of those that have the same, the first."""
    tensor: int
    """Number in its bucket."""
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
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes of a message that it takes."""
        return -(-self.size // _ALIGNMENT) * _ALIGNMENT

    def of(self, shards: Mapping[int, Shard]) -> Tensor:
        """Returns the piece as a view of its owner's part of the parameter."""
        return shards[self.slot][self.shard].narrow(self.dim, self.target, self.shape[self.dim])

    def within(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the piece as a view of its tensor."""
        return tensors[self.tensor].narrow(self.dim, self.start, self.shape[self.dim])


class _Message(NamedTuple):
    """A message of one rank: all of a bucket that it alone has."""

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
    """The places of a bucket or a message, and what belongs there."""

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
            chunks: this rank's.
            plan: of the tensors of `hf_stream.named_weights`.
            to_all: every rank fills buckets of its own, at the same time; else rank 0 alone does.
        """
        self._chunks, self._plan, self._rank = chunks, plan, dist.get_rank()
        pieces = _pieces(slots_of(chunks), _Ranks.all())
        self._messages = [_messages(bucket, pieces) for bucket in plan.buckets]
        owners = {message.owner for messages in self._messages for message in messages}
        self._here = self._rank
        """Messages of this rank are made of what is here."""
        if owners == {0}:  # all the others are replicas of it
            self._here, to_all = 0, False
        self._to_all = to_all
        self._regions = [self._room_for(messages) for messages in self._messages]
        self._buffer: Tensor | None = None
        self._addresses = list[int]()
        self._shards = list[OwnShard]()
        self._copies: dict[tuple[int, int], _Copies] = {}

    def begin(self) -> None:
        """Call it before every version."""
        parameters = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        addresses = [parameter.data_ptr() for parameter in parameters]
        if addresses != self._addresses:
            self._addresses, self._shards = addresses, own_shards(self._chunks)
            self._copies = {}
        if self._buffer is None:
            device = parameters[0].device
            size = max(r.stop for regions in self._regions for r in [slice(0), *regions.values()])
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def fill(self, index: int, flat: Tensor) -> None:
        """Puts bucket `index` into `flat`, in the order of the current stream.

        Bucket after bucket, while the other ranks do so, too, or `give`. It may be left off between
        two buckets, as long as the rest is filled at some time, and left out where all leave it
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
        """Sends rank 0 what it lacks of the other buckets. Of other ranks, if it is not to all."""
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
        """Returns what gives the pieces: views, or parts of matrices that it makes each time."""
        slots = sorted({piece.slot for piece in pieces})

        def values() -> list[Tensor]:
            shards = {slot: self._shards[slot].shard() for slot in slots}
            return [piece.of(shards) for piece in pieces]

        if any(self._shards[slot].is_made for slot in slots):
            return values
        views_of_weights = values()
        return lambda: views_of_weights

    def _room_for(self, messages: Sequence[_Message]) -> dict[int, slice]:
        """Owner -> where in the buffer a message is packed, or received."""
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
    """Sorts the pieces of a bucket's tensors by owner, into a message of each."""
    by_owner: dict[int, list[_Piece]] = {}
    for number in range(len(bucket)):
        for piece in next(pieces):
            by_owner.setdefault(piece.owner, []).append(piece._replace(tensor=number))
    return [_Message(owner, by_owner[owner]) for owner in sorted(by_owner)]


def _pieces(slots: Sequence[Slot], ranks: _Ranks) -> Iterator[list[_Piece]]:
    """Yields the pieces of every tensor, in the order of `hf_stream.named_weights`."""
    for number, slot in enumerate(slots):
        for expert in range(slot.parameter.num_experts or 1):
            pieces = list(_pieces_of(slot, number, expert, ranks))
            for source in range(len(slot.parameter.hf)):
                yield [piece for of, piece in pieces if of == source]


def _pieces_of(slot: Slot, number: int, expert: int, ranks: _Ranks) -> Iterator[tuple[int, _Piece]]:
    """Yields the pieces of one matrix, each with the number of the tensor that it is from."""
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
