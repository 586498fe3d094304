"""Runs inside SGLang: pixels of images, which become patches where its tower is about to see them.

A request carries its media from process to process, also one that finds all of them in the cache of
prefixes. Pixels are a quarter of their patches in 16 bits, and a request in eight needs them.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from relax_hpc.media.patches import patches
from relax_hpc.media.recipe import Vision

VISION = "relax_vision"
"""Name by which an item has the recipe of its pixels."""


def carried(vision: Vision) -> dict[str, Vision]:
    """The facts that an item needs beside its pixels."""
    return {VISION: vision}


def seen_by(tower: Callable[[Sequence[Any]], Tensor], visual: Any) -> Callable[..., Tensor]:  # noqa: ANN401
    """SGLang's method that makes features of items, for those with pixels, too.

    Args:
        tower: the method.
        visual: its tower, which has a device and a dtype.
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
