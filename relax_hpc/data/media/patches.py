"""Turns canonical pixels into the rows that a vision encoder takes, in the model's dtype."""

from functools import lru_cache

import torch
from torch import Tensor

from relax_hpc.data.media.recipe import VisionRecipe


@lru_cache(maxsize=4)
def table(vision: VisionRecipe, dtype: torch.dtype) -> Tensor:
    """Returns [3, 256]: the value of each level of each colour.

    A table, because GPU and CPU round the same formula differently. In float32 it matches
    transformers' PIL backend bit for bit.
    """
    levels = (torch.arange(256, dtype=torch.float64) * (1 / 255)).to(torch.float32)
    mean, std = (torch.tensor(each, dtype=torch.float32)[:, None] for each in vision[3:5])
    return ((levels - mean) / std).to(dtype)


def patches(pixels: Tensor, vision: VisionRecipe, dtype: torch.dtype) -> Tensor:
    """Cuts frames into patches; those of a token are adjacent.

    Args:
        pixels: [frames, height, width, 3] uint8, canonical; an image has 1 frame.
        vision: the recipe that made them.
        dtype: of the model.

    Returns:
        [patches, 3 * time * patch * patch], on the device of the pixels. The last frame is repeated
        to fill up `time`.
    """
    missing = -pixels.shape[0] % vision.time
    if missing:
        pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
    values = table(vision, dtype).to(pixels.device)
    frames, height, width, _ = pixels.shape
    side, merge = vision.patch, vision.merge
    columns = height // side // merge, width // side // merge
    cut = pixels.view(
        frames // vision.time, vision.time, columns[0], merge, side, columns[1], merge, side, 3
    )
    cut = cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)  # t, y, x, merged y, merged x, colour, time, y, x
    shown = torch.stack([values[c][cut[:, :, :, :, :, c].long()] for c in range(3)], dim=5)
    return shown.reshape(-1, 3 * vision.time * side * side)
