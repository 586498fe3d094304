"""Encodes media before the pipeline, and backpropagates gradients of features after it.

The media of a portion are divided over the ranks of the first stage (tensor and context parallel).
One rank encodes each medium once, however many rows show it, without a graph, and features are
gathered. After the pipeline has processed all micro-batches, gradients of features go back to that
rank. It encodes the medium again, in batches of patches, and backpropagates: encoders never keep
more activations than of a batch. The sum equals that of one joint graph, since a gradient is linear
in the incoming gradient. All ranks of a replica have the same rows, and so the same plan: no
collective depends on which rank has media.

Sound has features of the first level only. Its rows of other levels are zeros: adding them changes
no token, and their gradient is not used.

Source: encoders apart from the pipeline are the two passes of GradCache (arXiv:2101.06983).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from relax_hpc.data.media.kinds import Modality, modality_of
from relax_hpc.data.media.patches import patches
from relax_hpc.data.media.recipe import Recipe
from relax_hpc.errors import TrainingError
from relax_hpc.schema import Medium
from relax_hpc.trainer.megatron.features import (
    Features,
    gather_on_host,
    make_host_zeros,
    needs_host_memory,
    sum_on_host,
)
from relax_hpc.trainer.megatron.packing import FeatureSpan, Key, MicroBatch
from relax_hpc.trainer.models import towers
from relax_hpc.trainer.models.architecture import (
    CHUNK,
    Architecture,
    AudioArchitecture,
    VisionArchitecture,
    windows_of,
)
from relax_hpc.trainer.models.towers import Frame, Places
from relax_hpc.trainer.training_engine import Pixels


class MediumRange(NamedTuple):
    """Consecutive parts of a medium: frames of pixels, or windows of sound."""

    medium: Medium
    array: Tensor
    """Canonical array of the whole medium, in host memory."""
    first: int
    """Index of the first part in the medium."""
    parts: int


class ModalityEncoder(Protocol):
    """An encoder. Its result for a part of a medium depends on no other part."""

    @property
    def tower(self) -> nn.Module: ...

    def misfit(self, medium: Medium, array: Tensor, features: int) -> str:
        """Returns why an array cannot be that of a medium with so many features; "" if it can."""
        ...

    def sizes(self, medium: Medium, array: Tensor) -> list[int]:
        """Returns the patches of each part; a token of sound counts as many as a token of pixels
        has."""
        ...

    def features(self, runs: Sequence[MediumRange], *, recompute: bool = False) -> list[Tensor]:
        """Returns [tokens, h] of each level of this encoder, for all parts of runs.

        Args:
            recompute: whether to keep less for the gradient.
        """
        ...


def encoders_of(
    sees: towers.VisionTower | None,
    hears: towers.SoundTower | None,
    shape: Architecture,
    recipe: Recipe,
    device: torch.device,
) -> Mapping[Modality, ModalityEncoder]:
    """Returns the encoder of each modality; none on a stage without encoders."""
    found: dict[Modality, ModalityEncoder] = {}
    if sees is not None:
        assert shape.vision
        found["image"] = found["video"] = VisionEncoder(sees, shape.vision, recipe, device)
    if hears is not None:
        assert shape.audio and shape.vision
        found["audio"] = AudioEncoder(hears, shape.audio, shape.vision.merge**2, device)
    return found


class VisionEncoder:
    def __init__(
        self,
        tower: towers.VisionTower,
        shape: VisionArchitecture,
        recipe: Recipe,
        device: torch.device,
    ) -> None:
        """`recipe` says how canonical pixels become patches."""
        self.tower, self._shape, self._recipe, self._device = tower, shape, recipe, device

    def misfit(self, medium: Medium, array: Tensor, features: int) -> str:
        time, height, width = medium.grid_thw
        side, frames = self._shape.patch, -(-len(array) // self._shape.time)
        if (frames, *array.shape[1:]) == (time, height * side, width * side, 3):
            return ""
        return f"is {list(array.shape)}, and its grid {[time, height, width]}"

    def sizes(self, medium: Medium, array: Tensor) -> list[int]:
        time, height, width = medium.grid_thw
        return [height * width] * time

    def features(self, runs: Sequence[MediumRange], *, recompute: bool = False) -> list[Tensor]:
        dtype, frames, cut = next(self.tower.parameters()).dtype, list[Frame](), []
        for medium, array, first, parts in runs:
            frames += [Frame(*medium.grid_thw[1:])] * parts
            pixels = array[first * self._shape.time : (first + parts) * self._shape.time]
            is_image = modality_of(medium) == "image"
            how = self._recipe.image if is_image else self._recipe.video.vision
            cut.append(patches(pixels.to(self._device), how, dtype))
        places = Places.of(frames, self._shape, self._device)
        levels: list[Tensor] = self.tower(torch.cat(cut), places, recompute=recompute)
        return levels


class AudioEncoder:
    def __init__(
        self,
        tower: towers.SoundTower,
        shape: AudioArchitecture,
        area: int,
        device: torch.device,
    ) -> None:
        """`area` is the number of patches that a token counts as."""
        self.tower, self._shape, self._area, self._device = tower, shape, area, device

    def misfit(self, medium: Medium, array: Tensor, features: int) -> str:
        if array.ndim != 2 or len(array) != self._shape.bins:
            return f"is {list(array.shape)}, and the model hears {self._shape.bins} mel bins"
        tokens = sum(self.sizes(medium, array)) // self._area
        if tokens == features:
            return ""
        return f"has {array.shape[1]} mel frames, {tokens} tokens, and its spans {features} tokens"

    def sizes(self, medium: Medium, array: Tensor) -> list[int]:
        windows = windows_of(array.shape[1], self._shape.chunks)
        return [window.tokens * self._area for window in windows]

    def features(self, runs: Sequence[MediumRange], *, recompute: bool = False) -> list[Tensor]:
        dtype, windows, cut = next(self.tower.parameters()).dtype, [], []
        for _, array, first, parts in runs:
            own = windows_of(array.shape[1], self._shape.chunks)[first : first + parts]
            begin = first * self._shape.chunks * CHUNK
            mel = array[:, begin : begin + sum(window.frames for window in own)]
            windows += own
            cut.append(mel.to(self._device, dtype))
        return [self.tower(torch.cat(cut, dim=1), windows, recompute=recompute)]


@dataclass
class _EncoderBatch:
    """Parts of media that pass an encoder together."""

    encoder: ModalityEncoder
    begin: int
    """First patch, among those of this rank."""
    patches: int = 0
    runs: list[MediumRange] = field(default_factory=list)

    def add(self, medium: Medium, array: Tensor, number: int, patches: int) -> None:
        if self.runs and self.runs[-1].array is array:
            self.runs[-1] = self.runs[-1]._replace(parts=self.runs[-1].parts + 1)
        else:
            self.runs.append(MediumRange(medium, array, number, 1))
        self.patches += patches

    def tokens(self, area: int) -> slice:
        """Returns their range among the tokens of this rank."""
        return slice(self.begin // area, (self.begin + self.patches) // area)


class _Plan(NamedTuple):
    """The assignment of media to ranks."""

    own: list[FeatureSpan]
    """One span of each medium that this rank encodes."""
    first: dict[Key, int]
    """First feature of each medium."""
    room: int
    """Number of features reserved on each rank."""


class Encoder:
    """One rank's part; collective over the ranks of a replica on the first stage."""

    def __init__(
        self,
        encoders: Mapping[Modality, ModalityEncoder],
        shape: VisionArchitecture,
        device: torch.device,
        *,
        patches_at_once: int,
        features_gib: float | None = None,
    ) -> None:
        """Holds the encoders.

        Args:
            shape: of the vision encoder, which has the most levels.
            patches_at_once: patches encoded at a time; a larger part is alone, and recomputes some
                activations.
            features_gib: limit of features and gradients on the device; above it, all of them lie
                in host memory.
        """
        self._encoders, self._shape, self._device = encoders, shape, device
        self._patches_at_once, self._features_gib = patches_at_once, features_gib
        self.pixels: Pixels | None = None
        self._batches: list[_EncoderBatch] = []

    def encode(self, micro_batches: Sequence[MicroBatch], *, learns: bool) -> Features | None:
        """Encodes all media of micro-batches.

        Args:
            learns: whether `learn` follows with gradients.

        Returns:
            None if there are none, or on another stage.

        Raises:
            TrainingError: canonical arrays are not those of the rows.
        """
        found = [span for each in micro_batches for span in each.feature_spans]
        if not self._encoders or not found:
            return None
        group = mpu.get_tensor_and_context_parallel_group()
        plan = _share_out(found, group.size(), group.rank())
        self._batches = []
        towers = [encoder.tower for encoder in self._encoders.values()]
        dtype = next(towers[0].parameters()).dtype
        width = self._shape.levels * self._shape.out_size
        learning, size = learns and any(map(_learns, self._encoders.values())), group.size()
        is_far = needs_host_memory(
            size * plan.room, width, dtype, learns=learning, most=self._features_gib
        )

        def zeros(rows: int, of: torch.dtype) -> Tensor:
            if is_far:
                return make_host_zeros(rows, width, of, self._device)
            return torch.zeros(rows, width, dtype=of, device=self._device)

        mine = zeros(plan.room, dtype)
        with torch.no_grad():
            for batch in self._cut(plan.own, self._read(plan.own)):  # the next ones are decoded
                self._batches.append(batch)
                made = torch.cat(batch.encoder.features(batch.runs), dim=1)
                place = mine[batch.tokens(self._area), : made.shape[1]]
                place.copy_(made, non_blocking=True)
        values = mine
        if size > 1 and is_far:
            values = gather_on_host(mine, group, self._device)
        elif size > 1:
            values = mine.new_empty(size * plan.room, width)
            dist.all_gather_into_tensor(values, mine, group=group)
        gradient = zeros(len(values), torch.float32) if learning else None
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        return Features(values, gradient, plan.first, self._shape.out_size, anchor, is_far)

    def learn(self, features: Features | None, wrapped: DistributedDataParallel) -> None:
        """Adds the gradient of the encoders to the buffers of the first chunk.

        Args:
            features: of the last `encode`, with the rows' gradients.
        """
        if not self._encoders or features is None or features.gradient is None:
            return
        group = mpu.get_tensor_and_context_parallel_group()
        given = features.gradient
        if group.size() > 1 and features.is_in_host_memory:
            given = sum_on_host(given, group, self._device)
        elif group.size() > 1:
            given = given.new_empty(len(given) // group.size(), given.shape[1])
            dist.reduce_scatter_tensor(given, features.gradient, group=group)
        dtype = features.values.dtype
        with ExitStack() as stack:
            # Sums over replicas begin when all have done theirs: who has no media has no gradient.
            stack.enter_context(wrapped.no_sync())
            for batch in self._batches:
                if _learns(batch.encoder):
                    alone = batch.patches > self._patches_at_once
                    levels = batch.encoder.features(batch.runs, recompute=alone)
                    # Moved as it is: the host must not read what is still being copied there.
                    above = given[batch.tokens(self._area)].to(self._device, non_blocking=True)
                    parts = above.to(dtype).split(self._shape.out_size, dim=1)  # type: ignore[no-untyped-call]
                    torch.autograd.backward(levels, parts[: len(levels)])
        self._batches = []

    @property
    def _area(self) -> int:
        return self._shape.merge**2

    def _read(self, own: Sequence[FeatureSpan]) -> Iterator[Tensor]:
        """Yields canonical arrays of media, in host memory, as they are decoded."""
        if not own:
            return
        assert self.pixels is not None, "nobody said where pixels come from"
        for span, read in zip(own, self.pixels([(s.row, s.medium) for s in own]), strict=True):
            row, medium, array = (
                span.row,
                span.row.media[span.medium],
                torch.from_numpy(read),
            )
            if misfit := self._encoders[modality_of(medium)].misfit(medium, array, span.features):
                raise TrainingError(
                    f"guid {row.guid}, sibling {row.sibling}: medium {span.medium} {misfit}"
                )
            yield array

    def _cut(self, own: Sequence[FeatureSpan], arrays: Iterable[Tensor]) -> Iterator[_EncoderBatch]:
        """Yields batches of parts up to the limit of patches, each for one encoder."""
        last, begin = None, 0
        for span, array in zip(own, arrays, strict=True):
            medium = span.row.media[span.medium]
            encoder = self._encoders[modality_of(medium)]
            for number, size in enumerate(encoder.sizes(medium, array)):
                if (
                    last is None
                    or last.encoder is not encoder
                    or last.patches + size > self._patches_at_once
                ):
                    if last is not None:
                        yield last
                    last = _EncoderBatch(encoder, begin)
                last.add(medium, array, number, size)
                begin += size
        if last is not None:
            yield last


def _learns(encoder: ModalityEncoder) -> bool:
    return any(parameter.requires_grad for parameter in encoder.tower.parameters())


def _share_out(found: Sequence[FeatureSpan], size: int, rank: int) -> _Plan:
    """Assigns media, largest first, each to the rank with the least work so far.

    A rank encodes its vision media first, then its sounds.
    """
    distinct = {span.key: span for span in reversed(found)}
    loads, owned = [0] * size, [list[FeatureSpan]() for _ in range(size)]
    for key in sorted(distinct, key=lambda key: (-distinct[key].features, key)):
        least = loads.index(min(loads))
        loads[least] += distinct[key].features
        owned[least].append(distinct[key])
    room, first = max(loads), dict[Key, int]()
    for number, own in enumerate(owned):
        own.sort(key=lambda span: span.is_heard)
        done = number * room
        for span in own:
            first[span.key] = done
            done += span.features
    return _Plan(owned[rank], first, room)
