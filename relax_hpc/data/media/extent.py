"""Computes from a header how many pixels, patches and tokens a medium takes."""

import math
from typing import NamedTuple

import numpy as np

from relax_hpc.data.media.kinds import MediaFacts, Modality
from relax_hpc.data.media.recipe import AudioRecipe, Recipe, Video, VisionRecipe
from relax_hpc.schema import Array


class Extent(NamedTuple):
    """The size of a medium."""

    modality: Modality
    tokens: tuple[int, ...]
    """Tokens of each span: one span, or one per pair of frames, or as the sound of a video cuts it;
    see `interleave`."""
    size: tuple[int, int] = (0, 0)
    """Height and width in pixels, after resizing; zeros for sound."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """Patches in time, y and x; zeros for sound."""
    frames: tuple[int, ...] = ()
    """0-based frames taken from a video."""
    times: tuple[float, ...] = ()
    """Mean time of each pair of frames, in seconds."""
    seconds_per_grid: float = 0.0
    """Seconds between temporal patches of a video."""
    mel_frames: int = 0
    is_of_video: bool = False
    """Whether it is the sound of the medium before it."""


def extent_of(facts: MediaFacts, recipe: Recipe) -> Extent:
    """Computes the extent of a usable medium."""
    if facts.modality == "image":
        size = fit(facts.height, facts.width, recipe.image)
        grid = _grid(1, size, recipe.image)
        return Extent("image", (_tokens(grid, recipe.image),), size, grid)
    if facts.modality == "video":
        return _of_video(facts, recipe)
    assert recipe.audio is not None
    frames = mel_frames(facts, recipe.audio)
    return Extent("audio", (audio_tokens(frames, recipe.audio.chunk),), mel_frames=frames)


def interleave(video: Extent, sound: Extent, per_s: float) -> tuple[Extent, Extent]:
    """Interleaves a video and its sound by time.

    A pair of frames precedes the first sound token whose position is not before its own, so the
    first span is of the video; then the spans alternate.

    Args:
        video: in one span.
        sound: in one span.
        per_s: positions per second, and so sound tokens per second.

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
    """Computes the extent of a canonical array, without times.

    Args:
        grid: patches in time, y and x; zeros for sound.
        frames: taken from a video; empty for an image.
        seconds: between temporal patches of a video.
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


def _grid(frames: int, size: tuple[int, int], vision: VisionRecipe) -> tuple[int, int, int]:
    return -(-frames // vision.time), size[0] // vision.patch, size[1] // vision.patch


def _tokens(grid: tuple[int, int, int], vision: VisionRecipe) -> int:
    return math.prod(grid) // vision.merge**2


def fit(height: int, width: int, vision: VisionRecipe) -> tuple[int, int]:
    """Returns the height and width to which an image is resized: whole tokens, within the bounds,
    nearest to its shape.

    Source: `smart_resize` of transformers' Qwen2-VL image processor, to the pixel.
    """
    return _fit((height, width), vision.side, vision.least, vision.most)


def _fit(
    size: tuple[int, int], side: int, least: int, most: int, frames: int = 1, counted: int = 1
) -> tuple[int, int]:
    """Args:
    size: height and width.
    side: pixels per side of a token.
    least: fewest pixels of all frames.
    most: most of them.
    frames: that are resized.
    counted: frames after they are filled up.
    """
    height, width = (round(each / side) * side for each in size)
    pixels = frames * math.prod(size)
    if counted * height * width > most:
        by = math.sqrt(pixels / most)
        height, width = (max(side, math.floor(each / by / side) * side) for each in size)
    elif counted * height * width < least:
        by = math.sqrt(least / pixels)
        height, width = (math.ceil(each * by / side) * side for each in size)
    return height, width


def fit_video(frames: int, height: int, width: int, video: Video) -> tuple[int, int]:
    """Does the same for frames whose pixels are bounded in total.

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
    counted = round(frames / vision.time) * vision.time
    return _fit((height, width), side, least, most, frames, counted)


def frame_indices(num_frames: int, fps: float, recipe: Recipe) -> tuple[int, ...]:
    """Chooses frames of a video evenly from the first on, at the recipe's rate.

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


def _of_video(facts: MediaFacts, recipe: Recipe) -> Extent:
    vision = recipe.video.vision
    frames = frame_indices(facts.num_frames, facts.fps, recipe)
    if recipe.family.is_pixels_in_all:
        size = fit_video(len(frames), facts.height, facts.width, recipe.video)
    else:
        size = fit(facts.height, facts.width, vision)
    grid = _grid(len(frames), size, vision)
    tokens = _video_tokens(grid, recipe)
    sampled_fps = len(frames) / facts.num_frames * facts.fps
    times = _times(frames, facts.fps, vision.time)
    return Extent("video", tokens, size, grid, frames, times, vision.time / sampled_fps)


def _times(frames: tuple[int, ...], fps: float, time: int) -> tuple[float, ...]:
    """Mean of the first and last time of every `time` frames; repeats the last frame to fill up."""
    at = [frame / fps for frame in frames]
    at += at[-1:] * (-len(at) % time)
    return tuple((at[n] + at[n + time - 1]) / 2 for n in range(0, len(at), time))


def mel_frames(facts: MediaFacts, audio: AudioRecipe) -> int:
    """Mel frames of a sound after resampling."""
    return count_resampled(facts.num_samples, facts.sampling_rate, audio.sampling_rate) // audio.hop


def count_resampled(count: int, rate: int, new_rate: int) -> int:
    """Number of samples that soxr returns at another rate."""
    return count if rate == new_rate else int(count * new_rate / rate + 0.5)


def audio_tokens(frames: int, chunk: int) -> int:
    """Tokens for mel frames: the encoder takes `chunk` at a time and halves them three times.

    Source: `_get_feat_extract_output_lengths` of transformers' Qwen3-Omni: 13 for a whole chunk of
    100.
    """
    whole, rest = divmod(frames, chunk)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + whole * 13
