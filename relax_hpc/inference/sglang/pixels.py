"""Runs inside SGLang: turns pixels of images into patches just before the encoder.

A request carries its media from process to process, even if all of them are in the prefix cache.
Pixels are a quarter the size of 16-bit patches, and only one request in eight needs them.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from relax_hpc.data.media.patches import patches
from relax_hpc.data.media.recipe import VisionRecipe

VISION = "relax_vision"
"""Attribute with the recipe of an item's pixels."""


def collect_facts(vision: VisionRecipe) -> dict[str, VisionRecipe]:
    return {VISION: vision}


def make_method(tower: Callable[[Sequence[Any]], Tensor], visual: Any) -> Callable[..., Tensor]:  # noqa: ANN401
    """Wraps SGLang's method that makes features of items, so that it also takes pixels.

    Args:
        visual: its encoder, which has a device and a dtype.
    """

    def features(items: Sequence[Any]) -> Tensor:
        return tower([_with_patches(item, visual) for item in items])

    return features


def _with_patches(item: Any, visual: Any) -> Any:  # noqa: ANN401
    vision = item.model_specific_data.get(VISION)
    if vision is None:
        return item
    shown = copy.copy(item)
    shown.feature = patches(item.feature.to(visual.device), vision, visual.dtype)
    return shown
