"""Towers, and their ways from the canonical array of a medium to features of its tokens."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from relax_hpc.media.kinds import Modality, modality_of
from relax_hpc.media.patches import patches
from relax_hpc.media.recipe import Recipe
from relax_hpc.models.architecture import Architecture, Audio, Vision
from relax_hpc.models.audio import tower as audio
from relax_hpc.models.audio.windows import CHUNK, windows_of
from relax_hpc.models.vision import tower as vision
from relax_hpc.models.vision.frames import Frame, Places
from relax_hpc.schema import Medium


class Run(NamedTuple):
    """Consecutive parts of a medium: frames of pixels, or windows of sound."""

    medium: Medium
    array: Tensor
    """Canonical array of the whole medium, in host memory."""
    first: int
    """Number of the first part in the medium."""
    parts: int


class Sense(Protocol):
    """A tower. What it makes of a part of a medium depends on no other part."""

    @property
    def tower(self) -> nn.Module: ...

    def misfit(self, medium: Medium, array: Tensor, features: int) -> str:
        """Says why an array cannot be that of a medium with so many features; "" if it can."""
        ...

    def sizes(self, medium: Medium, array: Tensor) -> list[int]:
        """Patches of each part; a token of sound counts as many as a token of pixels has."""
        ...

    def features(self, runs: Sequence[Run], *, recompute: bool = False) -> list[Tensor]:
        """[tokens, h] of each level that this sense has, of all parts of runs.

        Args:
            recompute: keep less for the gradient.
        """
        ...


def senses_of(
    sees: vision.Tower | None,
    hears: audio.Tower | None,
    shape: Architecture,
    recipe: Recipe,
    device: torch.device,
) -> Mapping[Modality, Sense]:
    """Returns the sense of each modality; none on a stage without towers."""
    found: dict[Modality, Sense] = {}
    if sees is not None:
        assert shape.vision
        found["image"] = found["video"] = Eyes(sees, shape.vision, recipe, device)
    if hears is not None:
        assert shape.audio and shape.vision
        found["audio"] = Ears(hears, shape.audio, shape.vision.merge**2, device)
    return found


class Eyes:
    """The sense of images and videos."""

    def __init__(
        self, tower: vision.Tower, shape: Vision, recipe: Recipe, device: torch.device
    ) -> None:
        """Holds the tower; `recipe` says how canonical pixels become patches."""
        self.tower, self._shape, self._recipe, self._device = tower, shape, recipe, device

    def misfit(self, medium: Medium, array: Tensor, features: int) -> str:
        """Says why pixels cannot be those of a medium."""
        time, height, width = medium.grid_thw
        side, frames = self._shape.patch, -(-len(array) // self._shape.time)
        if (frames, *array.shape[1:]) == (time, height * side, width * side, 3):
            return ""
        return f"is {list(array.shape)}, and its grid {[time, height, width]}"

    def sizes(self, medium: Medium, array: Tensor) -> list[int]:
        time, height, width = medium.grid_thw
        return [height * width] * time

    def features(self, runs: Sequence[Run], *, recompute: bool = False) -> list[Tensor]:
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


class Ears:
    """The sense of sound."""

    def __init__(self, tower: audio.Tower, shape: Audio, area: int, device: torch.device) -> None:
        """Holds the tower; `area` is the number of patches that a token counts as."""
        self.tower, self._shape, self._area, self._device = tower, shape, area, device

    def misfit(self, medium: Medium, array: Tensor, features: int) -> str:
        """Says why a mel spectrum cannot be that of a medium."""
        if array.ndim != 2 or len(array) != self._shape.bins:
            return f"is {list(array.shape)}, and the model hears {self._shape.bins} mel bins"
        tokens = sum(self.sizes(medium, array)) // self._area
        if tokens == features:
            return ""
        return f"has {array.shape[1]} mel frames, {tokens} tokens, and its spans {features} tokens"

    def sizes(self, medium: Medium, array: Tensor) -> list[int]:
        windows = windows_of(array.shape[1], self._shape.chunks)
        return [window.tokens * self._area for window in windows]

    def features(self, runs: Sequence[Run], *, recompute: bool = False) -> list[Tensor]:
        dtype, windows, cut = next(self.tower.parameters()).dtype, [], []
        for _, array, first, parts in runs:
            own = windows_of(array.shape[1], self._shape.chunks)[first : first + parts]
            begin = first * self._shape.chunks * CHUNK
            mel = array[:, begin : begin + sum(window.frames for window in own)]
            windows += own
            cut.append(mel.to(self._device, dtype))
        return [self.tower(torch.cat(cut, dim=1), windows, recompute=recompute)]
