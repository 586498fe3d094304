"""Models that see or hear, and how each writes media among its tokens."""

from typing import NamedTuple

from relax_hpc.media.kinds import Modality


class Family(NamedTuple):
    name: str
    placeholders: dict[Modality, str]
    """Token that a medium is written with, as often as it has features; its modalities."""
    wrapped: dict[Modality, str]
    """The token between those that begin and end a medium, as the chat template writes it."""
    frame: str = ""
    """Text that every pair of frames of a video is written with, in place of the token; {time} is
    in seconds. "" writes the token only, for the whole video."""
    is_pixels_in_all: bool = False
    """Whether bounds of a video are of all its pixels; else of each frame's."""
    is_even: bool = False
    """Whether as many frames are taken as two can be merged of."""


_VISION = "<|vision_start|>{}<|vision_end|>"
_IMAGE, _VIDEO, _AUDIO = "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>"
_SEEN: dict[Modality, str] = {"image": _VISION.format(_IMAGE), "video": _VISION.format(_VIDEO)}

QWEN3_VL = Family(
    "qwen3_vl",
    {"image": _IMAGE, "video": _VIDEO},
    _SEEN,
    frame="<{time:.1f} seconds>" + _SEEN["video"],
    is_pixels_in_all=True,
)
QWEN3_OMNI = Family(
    "qwen3_omni",
    {"image": _IMAGE, "video": _VIDEO, "audio": _AUDIO},
    _SEEN | {"audio": f"<|audio_start|>{_AUDIO}<|audio_end|>"},
    is_even=True,
)
FAMILIES: dict[str, Family] = {
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "qwen3_omni_moe": QWEN3_OMNI,
}
"""By model_type of config.json."""
