"""Fills flat buckets with weights, ahead of sending them.

There are a few buffers, whatever the size of the model. While one is sent, the next is filled.
"""

from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from relax_hpc.runtime.comm.bucket import (
    BucketPlan,
    Digest,
    Sending,
    Spec,
    Wire,
    fingerprint,
    views,
)
from relax_hpc.runtime.comm.lanes import SharedMemory, allocate
from relax_hpc.runtime.devices import mark, new_stream

Wait = Callable[[Sending], None]


def in_order(sending: Sending) -> None:
    """Orders the next operation after `sending`, in the way the wire has for it."""
    sending.order_after()


class Gather(Protocol):
    """Gathers weights on rank 0; every rank of the trainer has its end of it."""

    def begin(self) -> None:
        """Starts a version; call it before every one."""
        ...

    def fill(self, index: int, flat: Tensor) -> None:
        """Rank 0: puts bucket `index` into `flat`, in the order of the current stream."""
        ...

    def give(self, skipped: Collection[int] = ()) -> None:
        """Other ranks: send the parts that rank 0 lacks of all buckets not skipped."""
        ...


def give_gathered(
    gather: Gather, tensors: Iterator[tuple[str, Tensor]], skipped: Collection[int] = ()
) -> None:
    """Takes the part of a rank other than 0; leaves the tensors unread, as no other rank reads
    any."""
    gather.begin()
    gather.give(skipped)


class Buffers:
    """Memory for buckets of a plan, kept between updates."""

    def __init__(self, plan: BucketPlan, device: torch.device, *, count: int) -> None:
        self.plan, self.device = plan, device
        self._count = min(count, len(plan.buckets))

    def __len__(self) -> int:
        return self._count

    def of(self, index: int) -> Tensor:
        """[size] uint8, for bucket `index`."""
        return self._flat[index % self._count][: self.plan.sizes[index]]

    def share(self) -> list[SharedMemory]:
        """Makes the memory mappable by other processes; call it before first use."""
        assert "_flat" not in vars(self)
        shared = [allocate(max(self.plan.sizes), self.device) for _ in range(self._count)]
        self._flat = [each.tensor for each in shared]
        return shared

    @cached_property
    def _flat(self) -> list[Tensor]:
        return self.plan.buffers(self._count, self.device)


class Outgoing:
    """One version of the weights, bucket by bucket."""

    def __init__(
        self,
        buffers: Buffers,
        tensors: Iterator[tuple[str, Tensor]],
        gather: Gather | None = None,
        *,
        digest: bool = False,
        fingerprints: bool = False,
        skipped: Collection[int] = (),
    ) -> None:
        """Takes nothing from `tensors` yet.

        Args:
            tensors: in the order of the plan; unread with a `gather`, else drained in any case.
            gather: fills buckets in place of `tensors`.
            digest: also makes a digest of all tensors, which reads them on the host.
        """
        self.skipped = tuple(skipped)
        self._buffers, self._tensors, self._gather = buffers, tensors, gather
        if gather:
            gather.begin()
        self._digest = Digest() if digest else None
        self._fingerprints = list[int]() if fingerprints else None
        self._coming = [n for n in range(len(buffers.plan.buckets)) if n not in self.skipped]
        self._filled, self._taken = 0, 0
        self._transfers = list[Sending]()
        self._users = dict[int, int]()
        """Buffer -> index of the bucket it last held."""
        # Else the wire would wait for the bucket that is filled ahead of it.
        self._stream = new_stream(buffers.device)
        self._is_full = list[torch.cuda.Event]()

    @property
    def plan(self) -> BucketPlan:
        return self._buffers.plan

    @property
    def buckets(self) -> list[tuple[Spec, ...]]:
        return [self.plan.buckets[index] for index in self._coming]

    @property
    def num_bytes(self) -> int:
        return sum(self.plan.sizes[index] for index in self._coming)

    def prefetch(self) -> None:
        """Fills the buffers; returns when they are full."""
        while self._filled < len(self._coming) and self._buffer_of_next() not in self._users:
            self._fill()
        if self._stream:
            torch.cuda.current_stream().synchronize()

    def send(self, wire: Wire, wait: Wait = in_order) -> Iterator[Sending]:
        """Sends bucket after bucket; each starts when the iterator advances.

        Args:
            wait: blocks until a bucket has left, if the next one in its buffer is read back at
                once. Nothing else on the host may wait for a peer, which may be dead.
        """
        for number, index in enumerate(self._coming):
            if number == self._filled:
                self._fill(wait)
            flat = self._buffers.of(index)
            if self._stream:
                self._stream.wait_event(self._is_full[number])
                with torch.cuda.stream(self._stream):
                    self._transfers.append(wire.start(flat))
            else:
                self._transfers.append(wire.start(flat))
            yield self._transfers[-1]
            if number + 1 == self._filled < len(self._coming):
                self._fill(wait)

    def warm_up(self, wire: Wire, wait: Wait = in_order) -> Iterator[Sending]:
        """Sends the first buffer's size in arbitrary bytes, to set up the wire."""
        yield wire.start(self._buffers.of(0))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Returns the tensors themselves, if nothing was sent or filled yet."""
        assert not self._filled
        return self._digest.of_all(self._tensors) if self._digest else self._tensors

    def drain(self) -> None:
        """Drains the remaining tensors, since the other ranks send them."""
        if self._gather:
            for index in self._coming[self._filled :]:
                self._gather.fill(index, self._buffers.of(index))
        else:
            for _ in self._tensors:
                pass

    @property
    def by_name(self) -> str:
        return self._digest.hexdigest() if self._digest else ""

    @property
    def fingerprints(self) -> list[int]:
        """Returns the fingerprints of the buckets, in order; empty if not requested."""
        return self._fingerprints or []

    def _fill(self, wait: Wait = in_order) -> None:
        index = self._coming[self._filled]
        bucket = self.plan.buckets[index]
        tensors = [] if self._gather else self._next(index)
        buffer = self._buffer_of_next()
        if buffer in self._users:
            (wait if self._reads_back else in_order)(self._transfers[self._users[buffer]])
        self._users[buffer] = self._filled
        flat = self._buffers.of(index)
        if self._gather:
            self._gather.fill(index, flat)
        else:
            torch._foreach_copy_(views(flat, bucket), tensors)
        if self._digest:
            for spec, tensor in zip(bucket, views(flat, bucket), strict=True):
                self._digest.add(spec.name, tensor)
        if self._fingerprints is not None:
            self._fingerprints.append(fingerprint(flat))
        if self._stream:
            self._is_full.append(mark())
        self._filled += 1

    @property
    def _reads_back(self) -> bool:
        return self._digest is not None or self._fingerprints is not None

    def _buffer_of_next(self) -> int:
        return self._coming[self._filled] % len(self._buffers)

    def _next(self, index: int) -> list[Tensor]:
        """Takes a bucket's tensors from the stream, skipping those before it."""
        found = list[Tensor]()
        for bucket in self.plan.buckets[self._taken : index + 1]:
            found = [self._take_as(spec) for spec in bucket]
        self._taken = index + 1
        return found

    def _take_as(self, spec: Spec) -> Tensor:
        name, tensor = next(self._tensors)
        assert (name, tensor.dtype, tuple(tensor.shape)) == spec[:3], f"{name} is not {spec}"
        return tensor
