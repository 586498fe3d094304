"""The room that a medium takes: pixels, patches and tokens, computed from its header alone."""

import math
from typing import NamedTuple

import numpy as np

from relax_hpc.media.facts import Facts
from relax_hpc.media.kinds import Modality
from relax_hpc.media.recipe import Audio, Recipe, Video, Vision
from relax_hpc.schema import Array


class Extent(NamedTuple):
    """The room of a medium, in numbers."""

    modality: Modality
    tokens: tuple[int, ...]
    """Tokens of each stretch that it is written in: one, or one for each pair of frames, or as the
    sound of a video cuts it; see `interleaved`."""
    size: tuple[int, int] = (0, 0)
    """Height and width in pixels, after it was resized; zeros of sound."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """Patches in time, y and x; zeros of sound."""
    frames: tuple[int, ...] = ()
    """Frames that are taken from a video, 0-based."""
    times: tuple[float, ...] = ()
    """Time of each pair of frames, in seconds; its mean."""
    seconds_per_grid: float = 0.0
    """Seconds from one patch of a video to the next in time."""
    mel_frames: int = 0
    is_of_video: bool = False
    """Whether it is the sound of the medium before it."""


def extent_of(facts: Facts, recipe: Recipe) -> Extent:
    """Computes the room of a medium that can be used; see `limits.check`."""
    if facts.modality == "image":
        size = fitted(facts.height, facts.width, recipe.image)
        grid = _grid(1, size, recipe.image)
        return Extent("image", (_tokens(grid, recipe.image),), size, grid)
    if facts.modality == "video":
        return _of_video(facts, recipe)
    assert recipe.audio is not None
    frames = mel_frames(facts, recipe.audio)
    return Extent("audio", (audio_tokens(frames, recipe.audio.chunk),), mel_frames=frames)


def interleaved(video: Extent, sound: Extent, per_s: float) -> tuple[Extent, Extent]:
    """Writes a video and its sound in turns, each pair of frames where its time comes.

    A pair of frames goes before the first token of sound whose position is not before its own, so
    the first stretch is of the video; a stretch of the one follows each of the other.

    Args:
        video: in one stretch.
        sound: in one stretch.
        per_s: positions of a second, and so tokens of sound.

    Source: `replace_video_with_audio_token` of transformers' Qwen3-Omni processor.
    """
    frames, (total,) = video.grid[0], sound.tokens
    of_pair = video.tokens[0] // frames
    shown, heard, done = [0], list[int](), 0
    for number in range(frames):
        before = min(math.ceil(number * video.seconds_per_grid * per_s), total)
        if before > done:
            heard.append(before - done)
            shown.append(0)
            done = before
        shown[-1] += of_pair
    heard += [total - done] if total > done else []
    return (
        video._replace(tokens=tuple(shown)),
        sound._replace(tokens=tuple(heard), is_of_video=True),
    )


def extent_of_array(
    array: Array,
    grid: tuple[int, int, int],
    frames: tuple[int, ...],
    seconds: float,
    recipe: Recipe,
) -> Extent:
    """Computes the room of a medium of which only the canonical array is left; without its times.

    Args:
        array: of the medium.
        grid: patches in time, y and x; zeros of sound.
        frames: that were taken of a video; none of an image.
        seconds: from one patch of a video to the next in time.
        recipe: of the model.
    """
    if array.ndim == 2:
        assert recipe.audio is not None, "models that do not hear are given no sound"
        num_frames = array.shape[1]
        return Extent(
            "audio", (audio_tokens(num_frames, recipe.audio.chunk),), mel_frames=num_frames
        )
    size = (array.shape[1], array.shape[2])
    if not frames:
        return Extent("image", (_tokens(grid, recipe.image),), size, grid)
    return Extent(
        "video", _video_tokens(grid, recipe), size, grid, frames, seconds_per_grid=seconds
    )


def _video_tokens(grid: tuple[int, int, int], recipe: Recipe) -> tuple[int, ...]:
    count = _tokens(grid, recipe.video.vision)
    return (count // grid[0],) * grid[0] if recipe.family.frame else (count,)


def _grid(frames: int, size: tuple[int, int], vision: Vision) -> tuple[int, int, int]:
    return -(-frames // vision.time), size[0] // vision.patch, size[1] // vision.patch


def _tokens(grid: tuple[int, int, int], vision: Vision) -> int:
    return math.prod(grid) // vision.merge**2


def fitted(height: int, width: int, vision: Vision) -> tuple[int, int]:
    """Returns the height and width that an image is resized to: whole tokens, within the bounds,
    and as nearly as may be of its shape.

    Source: `smart_resize` of transformers' Qwen2-VL image processor, to the pixel.
    """
    side, area = vision.side, height * width
    fit = round(height / side) * side, round(width / side) * side
    if fit[0] * fit[1] > vision.most:
        return _smaller(height, width, math.sqrt(area / vision.most), side)
    if fit[0] * fit[1] < vision.least:
        return _larger(height, width, math.sqrt(vision.least / area), side)
    return fit


def _smaller(height: int, width: int, by: float, side: int) -> tuple[int, int]:
    sizes = (max(side, math.floor(each / by / side) * side) for each in (height, width))
    return next(sizes), next(sizes)


def _larger(height: int, width: int, by: float, side: int) -> tuple[int, int]:
    sizes = (math.ceil(each * by / side) * side for each in (height, width))
    return next(sizes), next(sizes)


def fitted_video(frames: int, height: int, width: int, video: Video) -> tuple[int, int]:
    """Does as `fitted` for frames whose pixels are bounded all together.

    Source: `smart_resize` of transformers' Qwen3-VL video processor, to the pixel.
    """
    vision = video.vision
    side, least, most = vision.side, vision.least, vision.most
    if video.frame_tokens:
        low, high = (tokens * side**2 * frames for tokens in video.frame_tokens)
        least, most = low, max(low, min(high, most))
    if min(height, width) < side:
        scale = max(side / height, side / width)
        height, width = int(height * scale), int(width * scale)
    fit = round(height / side) * side, round(width / side) * side
    pixels = round(frames / vision.time) * vision.time * fit[0] * fit[1]
    if pixels > most:
        return _smaller(height, width, math.sqrt(frames * height * width / most), side)
    if pixels < least:
        return _larger(height, width, math.sqrt(least / (frames * height * width)), side)
    return fit


def frame_indices(num_frames: int, fps: float, recipe: Recipe) -> tuple[int, ...]:
    """Chooses the frames of a video, `fps` of its own a second, evenly from the first on.

    Source: `sample_frames` of transformers' Qwen3-VL and Qwen2-VL video processors, to the frame.
    """
    video, time = recipe.video, recipe.video.vision.time
    if not recipe.family.is_even:
        count = int(num_frames / fps * video.fps)
        count = min(max(count, video.least_frames), video.most_frames, num_frames)
        evenly = np.linspace(0, num_frames - 1, count).round().astype(np.int64)
        return tuple(evenly.tolist())
    most = min(video.most_frames, num_frames) // time * time
    wanted = min(max(num_frames / fps * video.fps, video.least_frames), most, num_frames)
    count = math.floor(wanted / time) * time
    # The places of torch.arange in float32: one of them can lie just below a whole number.
    places = np.arange(count) * (num_frames / count)
    return tuple(places.astype(np.float32).astype(np.int64).tolist())


def _of_video(facts: Facts, recipe: Recipe) -> Extent:
    vision = recipe.video.vision
    frames = frame_indices(facts.num_frames, facts.fps, recipe)
    if recipe.family.is_pixels_in_all:
        size = fitted_video(len(frames), facts.height, facts.width, recipe.video)
    else:
        size = fitted(facts.height, facts.width, vision)
    grid = _grid(len(frames), size, vision)
    tokens = _video_tokens(grid, recipe)
    sampled_fps = len(frames) / facts.num_frames * facts.fps
    times = _times(frames, facts.fps, vision.time)
    return Extent("video", tokens, size, grid, frames, times, vision.time / sampled_fps)


def _times(frames: tuple[int, ...], fps: float, time: int) -> tuple[float, ...]:
    """Mean of the first and the last time of every `time` frames; the last frame fills up."""
    at = [frame / fps for frame in frames]
    at += at[-1:] * (-len(at) % time)
    return tuple((at[n] + at[n + time - 1]) / 2 for n in range(0, len(at), time))


def mel_frames(facts: Facts, audio: Audio) -> int:
    """Mel frames of a sound after it was resampled."""
    return resampled(facts.num_samples, facts.sampling_rate, audio.sampling_rate) // audio.hop


def resampled(count: int, rate: int, new_rate: int) -> int:
    """Samples that soxr makes of some at another rate."""
    return count if rate == new_rate else int(count * new_rate / rate + 0.5)


def audio_tokens(frames: int, chunk: int) -> int:
    """Tokens of mel frames, `chunk` of which the encoder takes at a time and halves three times.

    Source: `_get_feat_extract_output_lengths` of transformers' Qwen3-Omni: 13 of a whole chunk of
    100.
    """
    whole, rest = divmod(frames, chunk)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + whole * 13
