"""Weights on their way out: flat buckets that are filled ahead of the wire.

There are a few buffers, whatever the size of the model. While one is sent, the next is filled.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from relax_hpc.comm.bucket import BucketPlan, Digest, Part, Spec, fingerprint, views
from relax_hpc.comm.shared_memory import SharedMemory, allocate
from relax_hpc.comm.streams import mark, new_stream
from relax_hpc.comm.wire import Sending, Wire

OwnParts = list[list[Part]]
"""What each tensor is made of, in the order of the plan."""


class Buffers:
    """Memory for buckets of a plan, kept from update to update."""

    def __init__(self, plan: BucketPlan, device: torch.device, *, count: int) -> None:
        """Makes the memory when it is needed first."""
        self.plan, self.device = plan, device
        self._count = min(count, len(plan.buckets))
        self._parts: OwnParts | None = None
        self._copies = list[tuple[list[Tensor], list[Tensor]]]()

    def __len__(self) -> int:
        return self._count

    def of(self, index: int) -> Tensor:
        """[size] uint8, for bucket `index`."""
        return self._flat[index % self._count][: self.plan.sizes[index]]

    def fill_with(self, index: int, parts: OwnParts) -> None:
        """Fills bucket `index` with tensors made of `parts`, in a few kernels."""
        if parts is not self._parts:
            self._parts, self._copies = parts, self._copies_of(parts)
        torch._foreach_copy_(*self._copies[index])

    def _copies_of(self, parts: OwnParts) -> list[tuple[list[Tensor], list[Tensor]]]:
        """For every bucket its places, and what belongs there."""
        copies, rest = [], iter(parts)
        for index, bucket in enumerate(self.plan.buckets):
            pairs = [
                (part.within(place), part.values)
                for place, tensor in zip(views(self.of(index), bucket), rest, strict=False)
                for part in tensor
            ]
            copies.append(([place for place, _ in pairs], [values for _, values in pairs]))
        return copies

    def shared(self) -> list[SharedMemory]:
        """Memory that other processes can map, from here on; to be called before it is used."""
        assert "_flat" not in vars(self)
        shared = [allocate(max(self.plan.sizes), self.device) for _ in range(self._count)]
        self._flat = [each.tensor for each in shared]
        return shared

    @cached_property
    def _flat(self) -> list[Tensor]:
        size = max(self.plan.sizes)
        return [
            torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(self._count)
        ]


class Outgoing:
    """One version of the weights, bucket by bucket."""

    def __init__(
        self,
        buffers: Buffers,
        tensors: Iterator[tuple[str, Tensor]],
        own: OwnParts | None,
        *,
        digest: bool = False,
        fingerprints: bool = False,
    ) -> None:
        """Takes nothing from `tensors` yet.

        Args:
            buffers: nothing else may use them meanwhile.
            tensors: in the order of the plan; taken to the end, one way or the other.
            own: what they are made of, if all of it is here; they are left alone then.
            digest: makes a digest of all tensors, too, which reads them on the host.
            fingerprints: makes one of every bucket.
        """
        self._buffers, self._tensors, self._own = buffers, tensors, own
        self._digest = Digest() if digest else None
        self._fingerprints = list[int]() if fingerprints else None
        self._filled = 0
        self._transfers = list[Sending]()
        # Else the wire would wait for the bucket that is filled ahead of it.
        self._stream = new_stream(buffers.device)
        self._is_full = list[torch.cuda.Event]()

    @property
    def plan(self) -> BucketPlan:
        return self._buffers.plan

    def prefetch(self) -> None:
        """Fills every buffer; returns when they are full."""
        while self._filled < len(self._buffers):
            self._fill()
        if self._stream:
            torch.cuda.current_stream().synchronize()

    def send(self, wire: Wire) -> Iterator[Sending]:
        """Sends bucket after bucket, each beginning when it is asked for."""
        for index in range(len(self.plan.buckets)):
            if index == self._filled:
                self._fill()
            flat = self._buffers.of(index)
            if self._stream:
                self._stream.wait_event(self._is_full[index])
                with torch.cuda.stream(self._stream):
                    self._transfers.append(wire.start(flat))
            else:
                self._transfers.append(wire.start(flat))
            yield self._transfers[-1]
            if index + 1 == self._filled < len(self.plan.buckets):
                self._fill()

    def warm_up(self, wire: Wire) -> Iterator[Sending]:
        """Sends as much as the first buffer holds, whatever it is, for the sake of the wire."""
        yield wire.start(self._buffers.of(0))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors themselves, if nothing was sent or filled yet."""
        assert not self._filled
        for name, tensor in self._tensors:
            if self._digest:
                self._digest.add(name, tensor)
            yield name, tensor

    def drain(self) -> None:
        """Takes what is left of the tensors: bringing them together needs every rank."""
        if self._own is None:
            for _ in self._tensors:
                pass

    def hexdigest(self) -> str:
        """Of all tensors, by name."""
        assert self._digest
        return self._digest.hexdigest()

    @property
    def fingerprints(self) -> list[int]:
        """Of the buckets, in order."""
        assert self._fingerprints is not None
        return self._fingerprints

    def _fill(self) -> None:
        index, bucket = self._filled, self.plan.buckets[self._filled]
        tensors = None if self._own else [self._next(spec) for spec in bucket]
        if index >= len(self._buffers):
            self._transfers[index - len(self._buffers)].order_after()
        flat = self._buffers.of(index)
        if tensors is None:
            assert self._own
            self._buffers.fill_with(index, self._own)
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

    def _next(self, spec: Spec) -> Tensor:
        name, tensor = next(self._tensors)
        assert (name, tensor.dtype, tuple(tensor.shape)) == spec, f"{name} is not {spec}"
        return tensor
