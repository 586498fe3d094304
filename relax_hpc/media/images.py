"""Images: JPEG, PNG and WEBP to RGB, as people see them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from relax_hpc.errors import first_line
from relax_hpc.media.facts import Facts
from relax_hpc.media.source import Source
from relax_hpc.schema import MediaKind

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
"""The EXIF tag that says how a camera was held, and its values that swap height and width."""
_IN_8_BITS: dict[str, Callable[[Any], object]] = {
    "L;2": lambda grey: grey % 4 * 85,
    "L;4": lambda grey: grey % 16 * 17,
    "RGB;16B": lambda colour: tuple(level >> 8 for level in colour),
}
"""Pillow's reading of a colour of a PNG, by the bits that the file has of it."""


def read_facts(source: Source) -> Facts:
    """Reads the header.

    Raises:
        ConfigError: it is no image, or an animation.
    """
    with _opened(source) as (image, kind):
        width, height = image.size
        if _orientation(image) in _TURNED:
            width, height = height, width
        return Facts("image", kind, height, width)


def decoded(source: Source) -> "Image":
    """Decodes it to RGB of 8 bits: turned as its EXIF says, with white behind what is transparent.

    Raises:
        ConfigError: it is no image, or a damaged one.
    """
    from PIL import ImageOps

    with _opened(source) as (image, _):
        _scale_transparent(image)
        return _rgb(ImageOps.exif_transpose(image) if _orientation(image) > 1 else image)


def resized(image: "Image", size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Resizes with Pillow's bicubic filter, whose result is the same on every machine.

    Args:
        image: RGB.
        size: height and width.

    Returns:
        [height, width, 3]
    """
    from PIL.Image import Resampling

    return np.asarray(image.resize((size[1], size[0]), Resampling.BICUBIC))


def _orientation(image: "Image") -> int:
    """How a camera was held, as far as the header says; Pillow decodes a PNG to look behind it."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return int(image.getexif().get(_ORIENTATION, 1))


def _scale_transparent(image: "ImageFile") -> None:
    """Makes the colour that a PNG calls transparent what Pillow makes of it in pixels, before they
    are decoded: it leaves that colour as the file has it."""
    scale = _IN_8_BITS.get(image.tile[0][3]) if image.tile else None
    if scale is not None and "transparency" in image.info:
        image.info["transparency"] = scale(image.info["transparency"])


def _rgb(image: "Image") -> "Image":
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits, of which Pillow would clip the upper half
        levels = np.asarray(image)
        grey = (levels >> 8).astype(np.uint8)
        if "transparency" in image.info:  # exactly one level, of which 8 bits tell too little
            grey[levels == image.info["transparency"]] = 255
        image = Image.fromarray(grey)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return image.convert("RGB")


@contextmanager
def _opened(source: Source) -> Iterator[tuple["ImageFile", MediaKind]]:
    from PIL import Image

    with source.opened() as file:
        encoding = source.encoding(file)
        with source.decoding(encoding):
            try:
                image = Image.open(file, formats=[encoding.name])
            except Image.DecompressionBombError as error:
                raise source.refused(
                    f"has too many pixels: {first_line(error)}; make it smaller"
                ) from None
            with image:
                _check(source, image, encoding.name)
                assert encoding.kind is not None
                yield image, encoding.kind


def _check(source: Source, image: "Image", name: str) -> None:
    # A JPEG of several pictures is a photo with a preview.
    if name != "JPEG" and getattr(image, "n_frames", 1) > 1:
        raise source.refused(
            f"is an animation of {getattr(image, 'n_frames', 1)} frames; save one of them, or name "
            "a video under videos"
        )
