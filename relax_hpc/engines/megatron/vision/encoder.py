"""Towers beside the pipeline: media -> features before it, gradients of features -> theirs after.

The media of a portion are shared out over the ranks of the first stage (tensor and context
parallel), each medium to one of them. It is encoded once, however many rows see it, without a
graph; features are brought together. After the pipeline has gone over all micro-batches, gradients
of features go back to who encoded the medium. That rank sees it again, in chunks of so many
patches, and goes backward: towers never keep more for the gradient than a chunk does. The sum is
what one joint graph gives, since a gradient is linear in what comes from above. All ranks of a
replica have the same rows, and so the same plan: no collective hangs on who has media.

Source: towers apart from the pipeline are GradCache's (arXiv:2101.06983) two passes.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from relax_hpc.engines.megatron.packing import MicroBatch
from relax_hpc.engines.megatron.vision.features import Features
from relax_hpc.engines.megatron.vision.stretches import Key, Stretch
from relax_hpc.engines.training_engine import Pixels
from relax_hpc.errors import TrainingError
from relax_hpc.media.kinds import modality_of
from relax_hpc.media.patches import patches
from relax_hpc.media.recipe import Recipe
from relax_hpc.models.architecture import Vision
from relax_hpc.models.vision.frames import Frame, Places
from relax_hpc.models.vision.tower import Tower
from relax_hpc.schema import Row


class _Share(NamedTuple):
    """The media that one rank encodes, in the order of their features."""

    media: list[tuple[Row, int]]
    frames: list[Frame]
    """Frames of all these media."""


@dataclass(frozen=True)
class _Chunk:
    """Frames that go through the tower together."""

    frames: list[Frame]
    patches: slice
    """Patches of this rank."""

    def tokens(self, merge: int) -> slice:
        area = merge**2
        return slice(self.patches.start // area, self.patches.stop // area)


class Encoder:
    """One rank's end; collective over the ranks of a replica that have the first stage."""

    def __init__(
        self,
        tower: Tower | None,
        shape: Vision,
        recipe: Recipe,
        device: torch.device,
        *,
        patches_at_once: int,
    ) -> None:
        """Holds the tower.

        Args:
            tower: None on the other stages.
            shape: of it.
            recipe: by which canonical pixels become patches.
            device: of the tower.
            patches_at_once: that are seen at a time; a larger frame is alone, and keeps less of
                what it computes.
        """
        self._tower, self._shape, self._recipe, self._device = tower, shape, recipe, device
        self._patches_at_once = patches_at_once
        self._own: list[Tensor] = []
        self.pixels: Pixels | None = None
        self.num_encoded = 0
        """Media that went through the tower of this rank, forward only."""
        self._shares: list[_Share] = []

    def encode(self, micro_batches: Sequence[MicroBatch], *, learns: bool) -> Features | None:
        """Sees all media of micro-batches.

        Args:
            learns: gradients follow, by `learn`.

        Returns:
            None where there are none, or on another stage.

        Raises:
            TrainingError: pixels are not those of the rows.
        """
        found = [stretch for each in micro_batches for stretch in each.stretches]
        if self._tower is None or not found:
            return None
        group = mpu.get_tensor_and_context_parallel_group()
        self._shares, first, room = self._shared_out(found, group.size())
        share = self._shares[group.rank()]
        self._own = self._read(share)
        self.num_encoded += len(share.media)
        shape = self._shape
        dtype = next(self._tower.parameters()).dtype
        width = shape.levels * shape.out_size
        mine = torch.zeros(room, width, dtype=dtype, device=self._device)
        with torch.no_grad():
            for chunk in self._chunks(share):
                levels = self._tower(self._patches(chunk, dtype), self._places(chunk))
                torch.cat(levels, dim=1, out=mine[chunk.tokens(shape.merge)])
        values = mine
        if group.size() > 1:
            values = mine.new_empty(group.size() * room, width)
            dist.all_gather_into_tensor(values, mine, group=group)
        learning = learns and any(p.requires_grad for p in self._tower.parameters())
        gradient = torch.zeros_like(values, dtype=torch.float32) if learning else None
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        return Features(values, gradient, first, shape.out_size, anchor)

    def learn(self, features: Features | None, wrapped: DistributedDataParallel) -> None:
        """Adds the gradient of the towers to the buffers of the first chunk.

        Args:
            features: of the last `encode`, which rows have added their gradients to.
            wrapped: the first chunk.
        """
        if self._tower is None or features is None or features.gradient is None:
            return
        group, shape = mpu.get_tensor_and_context_parallel_group(), self._shape
        given = features.gradient
        if group.size() > 1:
            given = given.new_empty(len(given) // group.size(), given.shape[1])
            dist.reduce_scatter_tensor(given, features.gradient, group=group)
        dtype = features.values.dtype
        with ExitStack() as stack:
            # Sums over replicas begin when all have done theirs: who has no media has no gradient.
            stack.enter_context(wrapped.no_sync())
            for chunk in self._chunks(self._shares[group.rank()]):
                alone = chunk.patches.stop - chunk.patches.start > self._patches_at_once
                levels = self._tower(
                    self._patches(chunk, dtype), self._places(chunk), recompute=alone
                )
                above = given[chunk.tokens(shape.merge)].to(dtype)
                torch.autograd.backward(levels, above.chunk(shape.levels, dim=1))
        self._own = []

    def _shared_out(
        self, found: Sequence[Stretch], size: int
    ) -> tuple[list[_Share], dict[Key, int], int]:
        """Gives each medium to the rank that has least to do so far, the largest first.

        Returns:
            Shares of the ranks; the first feature of each medium; room for the features of a rank.
        """
        distinct = {stretch.key: (stretch.row, stretch.medium) for stretch in reversed(found)}
        grids = {key: row.media[medium].grid_thw for key, (row, medium) in distinct.items()}
        patches_of = {key: int(np.prod(grid)) for key, grid in grids.items()}
        loads, keys = [0] * size, [list[Key]() for _ in range(size)]
        for key in sorted(distinct, key=lambda key: (-patches_of[key], key)):
            rank = loads.index(min(loads))
            loads[rank] += patches_of[key]
            keys[rank].append(key)
        area = self._shape.merge**2
        room, first, shares = max(loads) // area, dict[Key, int](), list[_Share]()
        for rank, own in enumerate(keys):
            done, frames = rank * room, list[Frame]()
            for key in own:
                time, height, width = grids[key]
                first[key] = done
                done += patches_of[key] // area
                frames += [Frame(height, width)] * time
            shares.append(_Share([distinct[key] for key in own], frames))
        return shares, first, room

    def _read(self, share: _Share) -> list[Tensor]:
        """Canonical pixels of the media of a share, in host memory."""
        if not share.media:
            return []
        assert self.pixels is not None, "nobody said where pixels come from"
        found = []
        for (row, medium), array in zip(share.media, self.pixels(share.media), strict=True):
            time, height, width = row.media[medium].grid_thw
            side = self._shape.patch
            frames = -(-len(array) // self._shape.time)
            if (frames, *array.shape[1:]) != (time, height * side, width * side, 3):
                raise TrainingError(
                    f"guid {row.guid}, sibling {row.sibling}: medium {medium} is "
                    f"{list(array.shape)}, and its grid {[time, height, width]}"
                )
            found.append(torch.from_numpy(array))
        return found

    def _chunks(self, share: _Share) -> Iterator[_Chunk]:
        """Yields as many frames at a time as there may be patches of."""
        begin, size, frames = 0, 0, list[Frame]()
        for frame in share.frames:
            if frames and size + frame.patches > self._patches_at_once:
                yield _Chunk(frames, slice(begin, begin + size))
                begin, size, frames = begin + size, 0, []
            frames.append(frame)
            size += frame.patches
        if frames:
            yield _Chunk(frames, slice(begin, begin + size))

    def _patches(self, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
        """[patches of the chunk, values] on the device, made there of pixels."""
        parts, begin = [], 0
        for pixels, (row, medium) in zip(self._own, self._media, strict=True):
            time, height, width = row.media[medium].grid_thw
            area, end = height * width, begin + time * height * width
            low, high = max(chunk.patches.start, begin), min(chunk.patches.stop, end)
            if low < high:
                steps = self._shape.time
                first, last = (low - begin) // area, (high - begin) // area
                vision = self._recipe.image
                if modality_of(row.media[medium]) != "image":
                    vision = self._recipe.video.vision
                part = pixels[first * steps : last * steps].to(self._device)
                parts.append(patches(part, vision, dtype))
            begin = end
        return torch.cat(parts)

    @property
    def _media(self) -> list[tuple[Row, int]]:
        rank: int = mpu.get_tensor_and_context_parallel_group().rank()
        return self._shares[rank].media

    def _places(self, chunk: _Chunk) -> Places:
        return Places.of(chunk.frames, self._shape, self._device)
