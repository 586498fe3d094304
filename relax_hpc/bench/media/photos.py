"""Drawn photos, as large as real ones are once they are compressed."""

import io
from typing import Literal

import numpy as np
import numpy.typing as npt

Format = Literal["JPEG", "PNG"]
_COARSE, _GRAIN = 24, 2.5
"""Points of a side that colours are drawn at, and the noise of each pixel: 1 MP of these are 0.3 MB
of JPEG and 1.5 MB of PNG."""


def pixels(seed: int, height: int, width: int) -> npt.NDArray[np.uint8]:
    """[height, width, 3] smooth colours with the grain of a sensor; another seed, others."""
    from PIL import Image

    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (_COARSE, _COARSE, 3)).astype(np.uint8)
    smooth = np.asarray(
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.float32
    )
    grain = random.standard_normal(smooth.shape, np.float32)
    return (smooth + _GRAIN * grain).clip(0, 255).astype(np.uint8)


def encoded(array: npt.NDArray[np.uint8], kind: Format) -> bytes:
    """Returns the file of an image, with Pillow's settings."""
    from PIL import Image

    file = io.BytesIO()
    if kind == "JPEG":
        Image.fromarray(array).save(file, kind, quality=95)
    else:
        Image.fromarray(array).save(file, kind)
    return file.getvalue()
