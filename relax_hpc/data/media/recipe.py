"""Reads the rules that make a model's media: its family's, its preprocessor's, and the job's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.config.prompts import MediaConfig
from relax_hpc.data.media.kinds import Modality
from relax_hpc.errors import ConfigError, show
from relax_hpc.runtime.files import user_files
from relax_hpc.runtime.files.records import read_json

READ = _ALL, _IMAGE_FILE, _VIDEO_FILE = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model's folder that a recipe is read from, if present; and config.json."""
_AGAIN = "download the model's files again"
_BICUBIC = 3
_IMAGE_TOKENS, _FRAME_TOKENS = (4, 16384), (128, 768)


class MediaFamily(NamedTuple):
    name: str
    placeholders: dict[Modality, str]
    """Token per feature of a medium; its keys are the family's modalities."""
    wrapped: dict[Modality, str]
    """The chat template's text for a medium: the placeholder between its begin and end tokens."""
    frame: str = ""
    """Text that replaces the token for every pair of frames; {time} is in seconds. "" writes the
    token once, for the whole video."""
    is_pixels_in_all: bool = False
    """Whether a video's bounds are for all its pixels; else per frame."""
    is_even: bool = False
    """Whether the number of frames is rounded to whole pairs."""


_VISION = "<|vision_start|>{}<|vision_end|>"
_IMAGE, _VIDEO, _AUDIO = "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>"
_SEEN: dict[Modality, str] = {"image": _VISION.format(_IMAGE), "video": _VISION.format(_VIDEO)}

QWEN3_VL = MediaFamily(
    "qwen3_vl",
    {"image": _IMAGE, "video": _VIDEO},
    _SEEN,
    frame="<{time:.1f} seconds>" + _SEEN["video"],
    is_pixels_in_all=True,
)
QWEN3_OMNI = MediaFamily(
    "qwen3_omni",
    {"image": _IMAGE, "video": _VIDEO, "audio": _AUDIO},
    _SEEN | {"audio": f"<|audio_start|>{_AUDIO}<|audio_end|>"},
    is_even=True,
)
FAMILIES: dict[str, MediaFamily] = {
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "qwen3_omni_moe": QWEN3_OMNI,
}
"""By model_type of config.json."""


class VisionRecipe(NamedTuple):
    """The way from pixels to patches."""

    patch: int
    """Pixels per side of a patch."""
    merge: int
    """Patches per side of a token."""
    time: int
    """Frames per patch."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    least: int
    """Fewest pixels of an image, a frame, or all frames; see `MediaFamily.is_pixels_in_all`."""
    most: int

    @property
    def side(self) -> int:
        """Pixels per side of a token."""
        return self.patch * self.merge


class Video(NamedTuple):
    vision: VisionRecipe
    fps: float
    """Frames taken per second."""
    least_frames: int
    most_frames: int
    frame_tokens: tuple[int, int] | None
    """The job's bounds for tokens per frame, for a family that bounds all pixels."""


class AudioRecipe(NamedTuple):
    sampling_rate: int
    bins: int
    n_fft: int
    hop: int
    """Samples between mel frames."""
    max_s: float
    chunk: int
    """Mel frames that the encoder takes at a time."""


class Recipe(NamedTuple):
    """Everything besides its bytes that determines a model's view of a medium."""

    family: MediaFamily
    image: VisionRecipe
    video: Video
    audio: AudioRecipe | None
    positions_per_s: float
    """Positions per second of video, for a family that does not write frames one by one."""
    audio_in_video: bool = False
    """Whether videos are heard, too."""


def is_shown_media(folder: Path) -> bool:
    return _family_in(read_json(folder / "config.json") or {}) is not None


def _family_in(config: Mapping[str, Any]) -> MediaFamily | None:
    return FAMILIES.get(str(config.get("model_type")))


def read_recipe(
    folder: Path, settings: MediaConfig, config: Mapping[str, Any] | None = None
) -> Recipe | None:
    """Reads the recipe of a model.

    Args:
        folder: of the model.
        settings: bounds of the job, which override the model's.
        config: the model's config.json, if that was read.

    Returns:
        None for a text-only model.

    Raises:
        ConfigError: the folder has no preprocessor, or an unsupported one, or the job requests the
            sound of videos and the model does not hear.
    """
    config = config or read_json(folder / "config.json") or {}
    family = _family_in(config)
    if family is None:
        return None
    files = _Files(folder)
    image = files.table("image_processor", _IMAGE_FILE)
    video = files.table("video_processor", _VIDEO_FILE, _IMAGE_FILE)
    has_sound = "audio" in family.placeholders
    if settings.advanced.audio_in_video and not has_sound:
        raise ConfigError(
            f"prompts.media.advanced.audio_in_video = true: the model in {folder}, of "
            f"{family.name}, does not hear; remove it, or use a model of model_type qwen3_omni_moe"
        )
    sound = files.table("feature_extractor", _IMAGE_FILE) if has_sound else None
    thinker = config.get("thinker_config", config)
    chunk = 2 * int(thinker.get("audio_config", {}).get("n_window", 50))
    return Recipe(
        family,
        _vision(image, _pixels(image, settings.image_tokens or (), _IMAGE_TOKENS)),
        _video(family, video, settings),
        _audio(sound, settings, chunk) if sound else None,
        float(thinker.get("position_id_per_seconds", 13)),
        settings.advanced.audio_in_video,
    )


def read_view(folder: Path) -> Recipe | None:
    """Reads a model's recipe for a reader of canonical arrays.

    Patches and positions depend on no bound of a job; the recipe has the model's own bounds.

    Raises:
        ConfigError: as `read_recipe`.
    """
    return read_recipe(folder, MediaConfig())


class _Table:
    """Settings of a preprocessor, and their file."""

    def __init__(self, file: Path, record: Mapping[str, Any]) -> None:
        self._file, self.record = file, record

    def make_error(self, key: str, expected: str) -> ConfigError:
        value = show(self.record.get(key))
        return ConfigError(f"{self._file}: {key} = {value}: {expected}; {_AGAIN}")

    def count(self, key: str, default: int) -> int:
        value = self.record.get(key, default)
        if type(value) is not int or value < 1:
            raise self.make_error(key, "a positive integer is expected")
        return value

    def three(self, key: str) -> tuple[float, float, float]:
        value = self.record.get(key, [0.5, 0.5, 0.5])
        numbers = isinstance(value, list) and all(isinstance(x, int | float) for x in value)
        if not numbers or len(value) != 3:
            raise self.make_error(key, "three numbers are expected")
        return (float(value[0]), float(value[1]), float(value[2]))


class _Files:
    """The files of a model's preprocessor; newer models have a single one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records = {
            name: user_files.read_object(folder / name, _AGAIN)
            for name in READ
            if (folder / name).exists()
        }
        if not self._records:
            raise ConfigError(
                f"model.path = {folder}: has neither {_ALL} nor {_IMAGE_FILE}, which say how its "
                f"images are made; {_AGAIN}"
            )

    def table(self, part: str, *files: str) -> _Table:
        whole = self._records.get(_ALL, {}).get(part)
        if isinstance(whole, dict):
            return _Table(self._folder / _ALL, whole)
        for name in files:
            if name in self._records:
                return _Table(self._folder / name, self._records[name])
        raise ConfigError(
            f"{self._folder / _ALL}: has no {part}, and there is no {files[0]}; {_AGAIN}"
        )


def _pixels(table: _Table, asked: tuple[int, ...], usual: tuple[int, int]) -> tuple[int, int]:
    """Fewest and most pixels: the job's (in tokens), else the model's, else the usual ones."""
    area = (table.count("patch_size", 16) * table.count("merge_size", 2)) ** 2
    if asked:
        return asked[0] * area, asked[1] * area
    size = table.record.get("size") or {}
    least = size.get("shortest_edge") or table.record.get("min_pixels") or usual[0] * area
    most = size.get("longest_edge") or table.record.get("max_pixels") or usual[1] * area
    if type(least) is not int or type(most) is not int or not 0 < least <= most:
        raise table.make_error("size", "shortest_edge and longest_edge are expected, in pixels")
    return least, most


def _vision(table: _Table, pixels: tuple[int, int]) -> VisionRecipe:
    """Raises ConfigError: the preprocessor does something unsupported."""
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if table.record.get(key, True) is not True:
            raise table.make_error(key, "only true is followed")
    if table.record.get("resample", _BICUBIC) != _BICUBIC:
        raise table.make_error("resample", f"only {_BICUBIC}, bicubic, is followed")
    if abs(table.record.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise table.make_error("rescale_factor", "only 1/255 is followed")
    return VisionRecipe(
        table.count("patch_size", 16),
        table.count("merge_size", 2),
        table.count("temporal_patch_size", 2),
        table.three("image_mean"),
        table.three("image_std"),
        *pixels,
    )


def _video(family: MediaFamily, table: _Table, settings: MediaConfig) -> Video:
    asked = settings.video_tokens_per_frame
    if family is QWEN3_OMNI:  # its processor has bounds of its own, which no file changes
        pixels = _pixels(table, asked or _FRAME_TOKENS, _FRAME_TOKENS)
    else:
        pixels = _pixels(table, (), (4, 24576))
    least, most = settings.video_frames or (
        table.count("min_frames", 4),
        table.count("max_frames", 768),
    )
    fps = settings.video_fps or table.record.get("fps") or 2.0
    if isinstance(fps, bool) or not isinstance(fps, int | float) or fps <= 0:
        raise table.make_error("fps", "a positive number is expected")
    per_frame = asked if family.is_pixels_in_all else None
    return Video(_vision(table, pixels), float(fps), least, most, per_frame)


def _audio(table: _Table, settings: MediaConfig, chunk: int) -> AudioRecipe:
    return AudioRecipe(
        table.count("sampling_rate", 16000),
        table.count("feature_size", 128),
        table.count("n_fft", 400),
        table.count("hop_length", 160),
        settings.advanced.audio_max_s or float(table.count("chunk_length", 300)),
        chunk,
    )
