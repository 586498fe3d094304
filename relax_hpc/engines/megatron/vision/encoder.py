"""Towers beside the pipeline: media -> features before it, gradients of features -> theirs after.

The media of a portion are shared out over the ranks of the first stage (tensor and context
parallel), each medium to one of them. It is encoded once, however many rows show it, without a
graph; features are brought together. After the pipeline has gone over all micro-batches, gradients
of features go back to who encoded the medium. That rank encodes it again, in chunks of so many
patches, and goes backward: towers never keep more for the gradient than a chunk does. The sum is
what one joint graph gives, since a gradient is linear in what comes from above. All ranks of a
replica have the same rows, and so the same plan: no collective hangs on who has media.

Sound has features of the first level only. Of the other levels its rows are zeros, which change no
token that they are added to, and whose gradient nobody asks for.

Source: towers apart from the pipeline are GradCache's (arXiv:2101.06983) two passes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from relax_hpc.engines.megatron.packing import MicroBatch
from relax_hpc.engines.megatron.vision import host_memory
from relax_hpc.engines.megatron.vision.features import Features
from relax_hpc.engines.megatron.vision.senses import Run, Sense
from relax_hpc.engines.megatron.vision.stretches import Key, Stretch
from relax_hpc.engines.training_engine import Pixels
from relax_hpc.errors import TrainingError
from relax_hpc.media.kinds import Modality, modality_of
from relax_hpc.models.architecture import Vision
from relax_hpc.schema import Medium


@dataclass
class _Chunk:
    """Parts of media that go through a tower together."""

    sense: Sense
    begin: int
    """First patch, of those of this rank."""
    patches: int = 0
    runs: list[Run] = field(default_factory=list)

    def add(self, medium: Medium, array: Tensor, number: int, patches: int) -> None:
        """Takes the next part of a medium."""
        if self.runs and self.runs[-1].array is array:
            self.runs[-1] = self.runs[-1]._replace(parts=self.runs[-1].parts + 1)
        else:
            self.runs.append(Run(medium, array, number, 1))
        self.patches += patches

    def tokens(self, area: int) -> slice:
        """Tokens of this rank."""
        return slice(self.begin // area, (self.begin + self.patches) // area)


class _Plan(NamedTuple):
    """Who encodes what."""

    own: list[Stretch]
    """A stretch of each medium that is this rank's."""
    first: dict[Key, int]
    """First feature of each medium."""
    room: int
    """Features that there is room for on each rank."""


class Encoder:
    """One rank's end; collective over the ranks of a replica that have the first stage."""

    def __init__(
        self,
        senses: Mapping[Modality, Sense],
        shape: Vision,
        device: torch.device,
        *,
        patches_at_once: int,
        features_gib: float | None = None,
    ) -> None:
        """Holds the towers.

        Args:
            senses: none on the other stages.
            shape: of the tower that sees, which has the most levels.
            device: of the towers.
            patches_at_once: that are encoded at a time; a larger part is alone, and keeps less of
                what it computes.
            features_gib: that features and gradients may take of the device; if they take more, all
                of them lie in host memory.
        """
        self._senses, self._shape, self._device = senses, shape, device
        self._patches_at_once, self._features_gib = patches_at_once, features_gib
        self.pixels: Pixels | None = None
        self._chunks: list[_Chunk] = []

    def encode(self, micro_batches: Sequence[MicroBatch], *, learns: bool) -> Features | None:
        """Encodes all media of micro-batches.

        Args:
            learns: gradients follow, by `learn`.

        Returns:
            None where there are none, or on another stage.

        Raises:
            TrainingError: canonical arrays are not those of the rows.
        """
        found = [stretch for each in micro_batches for stretch in each.stretches]
        if not self._senses or not found:
            return None
        group = mpu.get_tensor_and_context_parallel_group()
        plan = _shared_out(found, group.size(), group.rank())
        self._chunks = []
        towers = [sense.tower for sense in self._senses.values()]
        dtype = next(towers[0].parameters()).dtype
        width = self._shape.levels * self._shape.out_size
        learning, size = learns and any(map(_learns, self._senses.values())), group.size()
        is_far = host_memory.is_needed(
            size * plan.room, width, dtype, learns=learning, most=self._features_gib
        )

        def zeros(rows: int, of: torch.dtype) -> Tensor:
            if is_far:
                return host_memory.zeros(rows, width, of, self._device)
            return torch.zeros(rows, width, dtype=of, device=self._device)

        mine = zeros(plan.room, dtype)
        with torch.no_grad():
            for chunk in self._cut(plan.own, self._read(plan.own)):  # the next ones are decoded
                self._chunks.append(chunk)
                made = torch.cat(chunk.sense.features(chunk.runs), dim=1)
                place = mine[chunk.tokens(self._area), : made.shape[1]]
                place.copy_(made, non_blocking=True)
        values = mine
        if size > 1 and is_far:
            values = host_memory.gathered(mine, group, self._device)
        elif size > 1:
            values = mine.new_empty(size * plan.room, width)
            dist.all_gather_into_tensor(values, mine, group=group)
        gradient = zeros(len(values), torch.float32) if learning else None
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        return Features(values, gradient, plan.first, self._shape.out_size, anchor, is_far)

    def learn(self, features: Features | None, wrapped: DistributedDataParallel) -> None:
        """Adds the gradient of the towers to the buffers of the first chunk.

        Args:
            features: of the last `encode`, which rows have added their gradients to.
            wrapped: the first chunk.
        """
        if not self._senses or features is None or features.gradient is None:
            return
        group = mpu.get_tensor_and_context_parallel_group()
        given = features.gradient
        if group.size() > 1 and features.is_in_host_memory:
            given = host_memory.summed(given, group, self._device)
        elif group.size() > 1:
            given = given.new_empty(len(given) // group.size(), given.shape[1])
            dist.reduce_scatter_tensor(given, features.gradient, group=group)
        dtype = features.values.dtype
        with ExitStack() as stack:
            # Sums over replicas begin when all have done theirs: who has no media has no gradient.
            stack.enter_context(wrapped.no_sync())
            for chunk in self._chunks:
                if _learns(chunk.sense):
                    alone = chunk.patches > self._patches_at_once
                    levels = chunk.sense.features(chunk.runs, recompute=alone)
                    # Moved as it is: the host must not read what is still being copied there.
                    above = given[chunk.tokens(self._area)].to(self._device, non_blocking=True)
                    parts = above.to(dtype).split(self._shape.out_size, dim=1)  # type: ignore[no-untyped-call]
                    torch.autograd.backward(levels, parts[: len(levels)])
        self._chunks = []

    @property
    def _area(self) -> int:
        return self._shape.merge**2

    def _read(self, own: Sequence[Stretch]) -> Iterator[Tensor]:
        """Canonical arrays of media, in host memory, as they are decoded."""
        if not own:
            return
        assert self.pixels is not None, "nobody said where pixels come from"
        for stretch, read in zip(own, self.pixels([(s.row, s.medium) for s in own]), strict=True):
            row, medium, array = (
                stretch.row,
                stretch.row.media[stretch.medium],
                torch.from_numpy(read),
            )
            if misfit := self._senses[modality_of(medium)].misfit(medium, array, stretch.features):
                raise TrainingError(
                    f"guid {row.guid}, sibling {row.sibling}: medium {stretch.medium} {misfit}"
                )
            yield array

    def _cut(self, own: Sequence[Stretch], arrays: Iterable[Tensor]) -> Iterator[_Chunk]:
        """Chunks of as many parts as there may be patches of, each for one tower."""
        last, begin = None, 0
        for stretch, array in zip(own, arrays, strict=True):
            medium = stretch.row.media[stretch.medium]
            sense = self._senses[modality_of(medium)]
            for number, patches in enumerate(sense.sizes(medium, array)):
                if (
                    last is None
                    or last.sense is not sense
                    or last.patches + patches > self._patches_at_once
                ):
                    if last is not None:
                        yield last
                    last = _Chunk(sense, begin)
                last.add(medium, array, number, patches)
                begin += patches
        if last is not None:
            yield last


def _learns(sense: Sense) -> bool:
    return any(parameter.requires_grad for parameter in sense.tower.parameters())


def _shared_out(found: Sequence[Stretch], size: int, rank: int) -> _Plan:
    """Gives each medium to the rank that has least to do so far, the largest first.

    A rank encodes what it sees, then what it hears.
    """
    distinct = {stretch.key: stretch for stretch in reversed(found)}
    loads, owned = [0] * size, [list[Stretch]() for _ in range(size)]
    for key in sorted(distinct, key=lambda key: (-distinct[key].features, key)):
        least = loads.index(min(loads))
        loads[least] += distinct[key].features
        owned[least].append(distinct[key])
    room, first = max(loads), dict[Key, int]()
    for number, own in enumerate(owned):
        own.sort(key=lambda stretch: stretch.is_heard)
        done = number * room
        for stretch in own:
            first[stretch.key] = done
            done += stretch.features
    return _Plan(owned[rank], first, room)
