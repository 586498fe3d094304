"""Canonical pixels -> the rows that a vision tower takes, in the model's dtype."""

from functools import lru_cache

import torch
from torch import Tensor

from relax_hpc.media.recipe import Vision


@lru_cache(maxsize=4)
def table(vision: Vision, dtype: torch.dtype) -> Tensor:
    """[3, 256] value of each level of each colour.

    A table and not a formula, since a GPU and a CPU do not round the same formula alike. In float32
    it is bitwise what transformers' PIL backend computes.
    """
    levels = (torch.arange(256, dtype=torch.float64) * (1 / 255)).to(torch.float32)
    mean, std = (torch.tensor(each, dtype=torch.float32)[:, None] for each in vision[3:5])
    return ((levels - mean) / std).to(dtype)


def patches(pixels: Tensor, vision: Vision, dtype: torch.dtype) -> Tensor:
    """Cuts frames into patches, those of a token one after the other.

    Args:
        pixels: [frames, height, width, 3] uint8, canonical; frames of an image: 1.
        vision: the recipe that they were made by.
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
