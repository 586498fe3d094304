"""Weights on their way out: flat buckets that are filled ahead of the wire.

There are a few buffers, whatever the size of the model. While one is sent, the next is filled.
"""

from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from relax_hpc.comm.bucket import BucketPlan, Digest, Spec, fingerprint, views
from relax_hpc.comm.shared_memory import SharedMemory, allocate
from relax_hpc.comm.streams import mark, new_stream
from relax_hpc.comm.wire import Sending, Wire

Wait = Callable[[Sending], None]


def in_order(sending: Sending) -> None:
    """Has what comes next come after it, as the wire knows how to."""
    sending.order_after()


class Gather(Protocol):
    """Brings weights together on rank 0; every rank of the trainer has its end of it."""

    def begin(self) -> None:
        """Call it before every version."""
        ...

    def fill(self, index: int, flat: Tensor) -> None:
        """Rank 0: puts bucket `index` into `flat`, in the order of the current stream."""
        ...

    def give(self, skipped: Collection[int] = ()) -> None:
        """The others: sends what rank 0 lacks of all buckets that are not skipped."""
        ...


class Giver:
    """The part of a rank other than 0 in a publication whose weights are gathered."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather

    def publish(
        self,
        version: int,
        tensors: Iterator[tuple[str, Tensor]],
        skipped: Collection[int] = (),
    ) -> None:
        """Leaves the tensors alone: nobody else takes any."""
        self._gather.begin()
        self._gather.give(skipped)


class Buffers:
    """Memory for buckets of a plan, kept from update to update."""

    def __init__(self, plan: BucketPlan, device: torch.device, *, count: int) -> None:
        """Makes the memory when it is needed first."""
        self.plan, self.device = plan, device
        self._count = min(count, len(plan.buckets))

    def __len__(self) -> int:
        return self._count

    def of(self, index: int) -> Tensor:
        """[size] uint8, for bucket `index`."""
        return self._flat[index % self._count][: self.plan.sizes[index]]

    def shared(self) -> list[SharedMemory]:
        """Memory that other processes can map, from here on; to be called before it is used."""
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
            buffers: nothing else may use them meanwhile.
            tensors: in the order of the plan; taken to the end, one way or the other.
            gather: what brings buckets of them here; the tensors are left alone then.
            digest: makes a digest of all tensors, too, which reads them on the host.
            fingerprints: makes one of every bucket.
            skipped: buckets that nobody is to be sent.
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
        """Buffer -> which of what comes was put there last."""
        # Else the wire would wait for the bucket that is filled ahead of it.
        self._stream = new_stream(buffers.device)
        self._is_full = list[torch.cuda.Event]()

    @property
    def plan(self) -> BucketPlan:
        return self._buffers.plan

    @property
    def buckets(self) -> list[tuple[Spec, ...]]:
        """The buckets that are sent."""
        return [self.plan.buckets[index] for index in self._coming]

    @property
    def num_bytes(self) -> int:
        """Bytes of these buckets."""
        return sum(self.plan.sizes[index] for index in self._coming)

    def prefetch(self) -> None:
        """Fills the buffers; returns when they are full."""
        while self._filled < len(self._coming) and self._buffer_of_next() not in self._users:
            self._fill()
        if self._stream:
            torch.cuda.current_stream().synchronize()

    def send(self, wire: Wire, wait: Wait = in_order) -> Iterator[Sending]:
        """Sends bucket after bucket, each beginning when it is asked for.

        Args:
            wire: where to.
            wait: blocks until a bucket has left, where the next in its buffer is read back at once:
                nothing else on the host may wait for a peer, who may be dead.
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
        """Sends as much as the first buffer holds, whatever it is, for the sake of the wire."""
        yield wire.start(self._buffers.of(0))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors themselves, if nothing was sent or filled yet."""
        assert not self._filled
        return self._digest.of_all(self._tensors) if self._digest else self._tensors

    def drain(self) -> None:
        """Takes what is left of them: the other ranks are bringing it here."""
        if self._gather:
            for index in self._coming[self._filled :]:
                self._gather.fill(index, self._buffers.of(index))
        else:
            for _ in self._tensors:
                pass

    @property
    def by_name(self) -> str:
        """Digest of all tensors by name; empty if none was asked for."""
        return self._digest.hexdigest() if self._digest else ""

    @property
    def fingerprints(self) -> list[int]:
        """Fingerprints of the buckets, in order; empty if none were asked for."""
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
        """Whether the host waits for what was put in a buffer."""
        return self._digest is not None or self._fingerprints is not None

    def _buffer_of_next(self) -> int:
        return self._coming[self._filled] % len(self._buffers)

    def _next(self, index: int) -> list[Tensor]:
        """Takes the tensors of a bucket from the stream, and those before it."""
        found = list[Tensor]()
        for bucket in self.plan.buckets[self._taken : index + 1]:
            found = [self._taken_as(spec) for spec in bucket]
        self._taken = index + 1
        return found

    def _taken_as(self, spec: Spec) -> Tensor:
        name, tensor = next(self._tensors)
        assert (name, tensor.dtype, tuple(tensor.shape)) == spec[:3], f"{name} is not {spec}"
        return tensor
