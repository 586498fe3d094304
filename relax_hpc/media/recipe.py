"""The rules by which a model's media are made: of its preprocessor's files, and of the job."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc import user_files
from relax_hpc.config.media import MediaConfig
from relax_hpc.errors import ConfigError, shown
from relax_hpc.media.family import FAMILIES, QWEN3_OMNI, Family
from relax_hpc.records import read_json

READ = _ALL, _IMAGE, _VIDEO = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model's folder that a recipe is read from, if they are there; and config.json."""
_AGAIN = "download the model's files again"
_BICUBIC = 3
_IMAGE_TOKENS, _FRAME_TOKENS = (4, 16384), (128, 768)


class Vision(NamedTuple):
    """The way from pixels to patches."""

    patch: int
    """Pixels of a side of a patch."""
    merge: int
    """Patches of a side of a token."""
    time: int
    """Frames of a patch."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    least: int
    """Fewest pixels: of an image, of a frame, or of all frames; see `Family.is_pixels_in_all`."""
    most: int

    @property
    def side(self) -> int:
        """Pixels of a side of a token."""
        return self.patch * self.merge


class Video(NamedTuple):
    vision: Vision
    fps: float
    """Frames that are taken a second."""
    least_frames: int
    most_frames: int
    frame_tokens: tuple[int, int] | None
    """Fewest and most tokens of a frame, of a family that bounds all pixels, if the job says it."""


class Audio(NamedTuple):
    sampling_rate: int
    bins: int
    """Mel bins."""
    n_fft: int
    hop: int
    """Samples from one mel frame to the next."""
    max_s: float
    chunk: int
    """Mel frames that the encoder takes at a time."""


class Recipe(NamedTuple):
    """Everything that a model's view of a medium depends on, besides its bytes."""

    family: Family
    image: Vision
    video: Video
    audio: Audio | None
    positions_per_s: float
    """Positions of a second of video, of a family that does not write frames one by one."""
    audio_in_video: bool = False
    """Whether videos are heard, too."""


def is_shown_media(folder: Path) -> bool:
    """Whether a model takes images, videos or sound."""
    return _family_in(read_json(folder / "config.json") or {}) is not None


def _family_in(config: Mapping[str, Any]) -> Family | None:
    return FAMILIES.get(str(config.get("model_type")))


def read_recipe(folder: Path, settings: MediaConfig) -> Recipe | None:
    """Reads the recipe of a model.

    Args:
        folder: of the model.
        settings: bounds of the job, which go before the model's.

    Returns:
        None for a model of text only.

    Raises:
        ConfigError: the folder has no preprocessor, or one that cannot be followed, or the job asks
            for the sound of videos and the model does not hear.
    """
    config = read_json(folder / "config.json") or {}
    family = _family_in(config)
    if family is None:
        return None
    files = _Files(folder)
    image = files.table("image_processor", _IMAGE)
    video = files.table("video_processor", _VIDEO, _IMAGE)
    has_sound = "audio" in family.placeholders
    if settings.audio_in_video and not has_sound:
        raise ConfigError(
            f"prompts.media.audio_in_video = true: the model in {folder}, of {family.name}, does "
            "not hear; remove it, or use a model of model_type qwen3_omni_moe"
        )
    sound = files.table("feature_extractor", _IMAGE) if has_sound else None
    thinker = config.get("thinker_config", config)
    chunk = 2 * int(thinker.get("audio_config", {}).get("n_window", 50))
    return Recipe(
        family,
        _vision(image, _pixels(image, settings.image_tokens or (), _IMAGE_TOKENS)),
        _video(family, video, settings),
        _audio(sound, settings, chunk) if sound else None,
        float(thinker.get("position_id_per_seconds", 13)),
        settings.audio_in_video,
    )


def read_view(folder: Path) -> Recipe | None:
    """Reads the recipe of a model for who is given canonical arrays.

    What is made of these, patches and positions, depends on no bound of a job: those in it are the
    model's own.

    Raises:
        ConfigError: as `read_recipe`.
    """
    return read_recipe(folder, MediaConfig())


class _Table:
    """Settings of a preprocessor, and the file that they are from."""

    def __init__(self, file: Path, record: Mapping[str, Any]) -> None:
        self._file, self.record = file, record

    def refused(self, key: str, expected: str) -> ConfigError:
        value = shown(self.record.get(key))
        return ConfigError(f"{self._file}: {key} = {value}: {expected}; {_AGAIN}")

    def count(self, key: str, default: int) -> int:
        value = self.record.get(key, default)
        if type(value) is not int or value < 1:
            raise self.refused(key, "a positive integer is expected")
        return value

    def three(self, key: str) -> tuple[float, float, float]:
        value = self.record.get(key, [0.5, 0.5, 0.5])
        numbers = isinstance(value, list) and all(isinstance(x, int | float) for x in value)
        if not numbers or len(value) != 3:
            raise self.refused(key, "three numbers are expected")
        return (float(value[0]), float(value[1]), float(value[2]))


class _Files:
    """The files of a model's preprocessor; newer models have all of it in one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records = {
            name: user_files.read_object(folder / name, _AGAIN)
            for name in READ
            if (folder / name).exists()
        }
        if not self._records:
            raise ConfigError(
                f"model.path = {folder}: has neither {_ALL} nor {_IMAGE}, which say how its images "
                f"are made; {_AGAIN}"
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


def _side(table: _Table) -> int:
    return table.count("patch_size", 16) * table.count("merge_size", 2)


def _pixels(table: _Table, asked: tuple[int, ...], usual: tuple[int, int]) -> tuple[int, int]:
    """Fewest and most pixels: of the job in tokens, else of the model, else the usual ones."""
    area = _side(table) ** 2
    if asked:
        return asked[0] * area, asked[1] * area
    size = table.record.get("size") or {}
    least = size.get("shortest_edge") or table.record.get("min_pixels") or usual[0] * area
    most = size.get("longest_edge") or table.record.get("max_pixels") or usual[1] * area
    if type(least) is not int or type(most) is not int or not 0 < least <= most:
        raise table.refused("size", "shortest_edge and longest_edge are expected, in pixels")
    return least, most


def _vision(table: _Table, pixels: tuple[int, int]) -> Vision:
    """Raises ConfigError: the preprocessor does something that is not done here."""
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if table.record.get(key, True) is not True:
            raise table.refused(key, "only true is followed")
    if table.record.get("resample", _BICUBIC) != _BICUBIC:
        raise table.refused("resample", f"only {_BICUBIC}, bicubic, is followed")
    if abs(table.record.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise table.refused("rescale_factor", "only 1/255 is followed")
    return Vision(
        table.count("patch_size", 16),
        table.count("merge_size", 2),
        table.count("temporal_patch_size", 2),
        table.three("image_mean"),
        table.three("image_std"),
        *pixels,
    )


def _video(family: Family, table: _Table, settings: MediaConfig) -> Video:
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
        raise table.refused("fps", "a positive number is expected")
    per_frame = asked if family.is_pixels_in_all else None
    return Video(_vision(table, pixels), float(fps), least, most, per_frame)


def _audio(table: _Table, settings: MediaConfig, chunk: int) -> Audio:
    return Audio(
        table.count("sampling_rate", 16000),
        table.count("feature_size", 128),
        table.count("n_fft", 400),
        table.count("hop_length", 160),
        settings.audio_max_s or float(table.count("chunk_length", 300)),
        chunk,
    )
