"""Decodes images, videos and sound to arrays.

Images (JPEG, PNG, WEBP) become upright RGB; videos (MP4, WEBM, lists of images) RGB frames; sound
(WAV, FLAC, MP3, OGG, and of videos) mono samples and their mel spectrum, as Whisper's preprocessor
makes it.

The spectrum is computed in numpy, in float64 and without matrix products, whose sums depend on the
processor: all nodes and library versions get the same array and digest.

Source: `WhisperFeatureExtractor` of transformers, for one sound; mel scale of M. Slaney, Auditory
Toolbox (1998).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.data.media.extent import Extent
from relax_hpc.data.media.kinds import MediaFacts
from relax_hpc.data.media.recipe import AudioRecipe, Recipe
from relax_hpc.data.media.source import MediaSource
from relax_hpc.errors import first_line
from relax_hpc.schema import MediaKind

if TYPE_CHECKING:
    from av import VideoFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile
    from soundfile import SoundFile

_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
"""The EXIF tag of a camera's orientation, and its values that swap height and width."""
_IN_8_BITS: dict[str, Callable[[Any], object]] = {
    "L;2": lambda grey: grey % 4 * 85,
    "L;4": lambda grey: grey % 16 * 17,
    "RGB;16B": lambda colour: tuple(level >> 8 for level in colour),
}
"""Pillow's conversion of a PNG colour to 8 bits, by the file's bit depth."""


def image_facts(source: MediaSource) -> MediaFacts:
    """Reads the header.

    Raises:
        ConfigError: no image, or an animation.
    """
    with _open(source) as (image, kind):
        width, height = image.size
        if _orientation(image) in _TURNED:
            width, height = height, width
        return MediaFacts("image", kind, height, width)


def decode_image(source: MediaSource) -> "Image":
    """Decodes to 8-bit RGB: rotated as its EXIF says, with white behind transparent pixels.

    Raises:
        ConfigError: no image, or a damaged one.
    """
    from PIL import ImageOps

    with _open(source) as (image, _):
        _scale_transparent(image)
        return _rgb(ImageOps.exif_transpose(image) if _orientation(image) > 1 else image)


def resize(image: "Image", size: tuple[int, int]) -> npt.NDArray[np.uint8]:
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
    """Reads the EXIF orientation if the header has it; for a PNG, Pillow decodes to look behind the
    pixels."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return int(image.getexif().get(_ORIENTATION, 1))


def _scale_transparent(image: "ImageFile") -> None:
    """Scales a PNG's transparent colour as Pillow scales its pixels, before they are decoded;
    Pillow keeps the file's value."""
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
def _open(source: MediaSource) -> Iterator[tuple["ImageFile", MediaKind]]:
    from PIL import Image

    with source.open_encoded() as (file, name, kind):
        try:
            image = Image.open(file, formats=[name])
        except Image.DecompressionBombError as error:
            raise source.make_error(
                f"has too many pixels: {first_line(error)}; make it smaller"
            ) from None
        with image:
            # A JPEG of several pictures is a photo with a preview.
            if name != "JPEG" and (count := getattr(image, "n_frames", 1)) > 1:
                raise source.make_error(
                    f"is an animation of {count} frames; save one of them, or name a video under "
                    "videos"
                )
            yield image, kind


_DEMUXERS = {MediaKind.MP4: "mov", MediaKind.WEBM: "matroska"}
"""FFmpeg's demuxer of each kind. Otherwise it would try hundreds, some of which open other files or
network ports named in the file."""


def video_facts(source: MediaSource, recipe: Recipe) -> MediaFacts:
    """Reads the header, and decodes the first frame, which holds the rotation.

    Raises:
        ConfigError: no video, or a list of images of different sizes.
    """
    if source.frames:
        return _of_list(source, recipe)
    with open_video(source) as (container, stream, kind):
        first = next(container.decode(stream), None)
        if first is None:
            return MediaFacts("video", kind, 2, 2)
        count = stream.frames if _are_all_shown(stream) else _count_frames(container, stream)
        height, width = first.height, first.width
        if _quarters(first) % 2:
            height, width = width, height
        return MediaFacts("video", kind, height, width, count, float(stream.average_rate or 0))


def decode_video(source: MediaSource, facts: MediaFacts, extent: Extent) -> npt.NDArray[np.uint8]:
    """Decodes the frames of the extent, rotated as the file says, and resizes them.

    Returns:
        [frames, height, width, 3]

    Raises:
        ConfigError: it is damaged, or its frames are not evenly spaced in time.
    """
    from PIL import Image

    if source.frames:
        found = (decode_image(source.frames[n]) for n in extent.frames)
    else:
        found = (Image.fromarray(frame) for frame in _frames(source, facts, extent.frames))
    return np.stack([resize(frame, extent.size) for frame in found])


def _of_list(source: MediaSource, recipe: Recipe) -> MediaFacts:
    facts = [image_facts(frame) for frame in source.frames]
    height, width = facts[0].height, facts[0].width
    for frame, each in zip(source.frames, facts, strict=True):
        if (each.height, each.width) != (height, width):
            raise frame.make_error(
                f"has {each.width} x {each.height} pixels, the first frame {width} x {height}; "
                "frames of a video have one size"
            )
    fps = source.fps or recipe.video.fps
    return MediaFacts("video", MediaKind.FRAMES, height, width, len(facts), fps)


def _are_all_shown(stream: "VideoStream") -> bool:
    """Whether the header's frame count is the number shown. A video cut without re-encoding keeps
    extra frames at its ends, needed only to decode others."""
    if not stream.frames or not stream.duration or not stream.time_base:
        return stream.frames > 0
    last = stream.duration * stream.time_base * (stream.average_rate or 0)
    return round(last) == stream.frames


def _count_frames(container: "InputContainer", stream: "VideoStream") -> int:
    """Counts the shown frames, without decoding them."""
    container.seek(0)
    return sum(1 for each in container.demux(stream) if each.size and not each.is_discard)


def _quarters(frame: "VideoFrame") -> int:
    """Counter-clockwise quarter turns; other angles are rounded."""
    quarters: int = round(frame.rotation / 90)
    return quarters % 4


def _frames(
    source: MediaSource, facts: MediaFacts, wanted: Sequence[int]
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yields the wanted frames in order: [height, width, 3]."""
    apart_s = facts.num_frames / facts.fps / len(wanted)
    chosen, start_s, seen = frozenset(wanted), 0.0, 0
    with open_video(source) as (container, stream, _):
        for number, frame in enumerate(container.decode(stream)):
            start_s = start_s if number else frame.time or 0.0
            seen = number + 1
            if number in chosen:
                _check_time(source, frame, number, start_s, facts.fps, apart_s / 2)
                turned = np.rot90(frame.to_ndarray(format="rgb24"), _quarters(frame))
                yield np.ascontiguousarray(turned)
            if number >= wanted[-1]:
                break
    if seen <= wanted[-1]:
        raise source.make_error(
            f"says {facts.num_frames} frames, and ends after {seen}; replace it, or remove the line"
        )


def _check_time(
    source: MediaSource, frame: "VideoFrame", number: int, start_s: float, fps: float, most_s: float
) -> None:
    """Refuses frames whose times contradict their numbers, since the model gets these as times."""
    said_s = number / fps
    is_s = (frame.time or 0.0) - start_s
    if abs(is_s - said_s) > most_s:
        raise source.make_error(
            f"has frames at a variable rate: number {number} comes at {is_s:.2f} s, and at "
            f"{said_s:.2f} s with {fps:.4g} a second; write it again, e.g. ffmpeg -i it -r 30"
        )


@contextmanager
def open_video(source: MediaSource) -> Iterator[tuple["InputContainer", "VideoStream", MediaKind]]:
    """Opens a video with its first video stream.

    Raises:
        ConfigError: no video, or it has no frames.
    """
    import av

    with source.open_encoded() as (file, name, kind):
        demuxer = _DEMUXERS[kind]
        alone = {"format_whitelist": demuxer, "protocol_whitelist": ""}
        with av.open(file, "r", format=demuxer, options=alone) as container:
            if not container.streams.video:
                raise source.make_error(
                    f"is {name} without a video; replace it, or remove the line"
                )
            stream = container.streams.video[0]
            stream.thread_type, stream.codec_context.thread_count = "NONE", 1
            yield container, stream, kind


MOST_CHANNELS = 2
_SILENT = 2**-15
"""Smallest amplitude in 16 bits."""
_MICROSECONDS = 1e6
_FORMATS = {
    MediaKind.WAV: ("WAV", "WAVEX", "RF64"),
    MediaKind.FLAC: ("FLAC",),
    MediaKind.MP3: ("MP3",),
    MediaKind.OGG: ("OGG",),
}
"""libsndfile's names for each kind; it knows twenty others."""


def sound_facts(source: MediaSource) -> MediaFacts:
    """Reads the header; a video without sound has no samples.

    Raises:
        ConfigError: no sound, or it has more than two channels.
    """
    if source.is_of_video:
        return _facts_of_video(source)
    with _open_sound(source) as (sound, kind):
        _check_channels(source, sound.channels)
        return MediaFacts("audio", kind, num_samples=sound.frames, sampling_rate=sound.samplerate)


def decode_sound(source: MediaSource, audio: AudioRecipe) -> npt.NDArray[np.float32]:
    """Decodes to the mean of its channels, at the rate of the recipe.

    Returns:
        [samples] in [-1, 1].

    Raises:
        ConfigError: it is damaged, silent, or has NaN samples; only the sound of a video may be
            silent.
    """
    samples, rate = _of_video(source) if source.is_of_video else _of_sound(source)
    if rate != audio.sampling_rate:
        import soxr

        samples = soxr.resample(samples, rate, audio.sampling_rate, quality="HQ")
    if not np.isfinite(samples).all():
        raise source.make_error(
            "has samples that are infinite or no numbers; write it again in 16 bits, e.g. "
            "ffmpeg -i it it.flac"
        )
    return np.ascontiguousarray(samples, np.float32)


def _of_sound(source: MediaSource) -> tuple[npt.NDArray[np.float32], int]:
    """Returns [samples], and the sampling rate."""
    with _open_sound(source) as (sound, _):
        rate = sound.samplerate
        samples = sound.read(dtype="float32", always_2d=True).mean(axis=1, dtype=np.float32)
    if not len(samples) or np.abs(samples).max() < _SILENT:
        raise source.make_error("is silent; replace it, or remove the line")
    return samples, rate


def _check_channels(source: MediaSource, channels: int) -> None:
    if channels > MOST_CHANNELS:
        raise source.make_error(
            f"has {channels} channels; mix it down to one or two, e.g. ffmpeg -i it -ac 1"
        )


def _facts_of_video(source: MediaSource) -> MediaFacts:
    """The sound lasts from the first frame of the video to its own end, by the header."""
    with open_video(source) as (container, video, kind):
        if not container.streams.audio:
            return MediaFacts("audio", kind)
        sound = container.streams.audio[0]
        _check_channels(source, sound.codec_context.channels)
        rate = sound.codec_context.sample_rate
        samples = max(0, round(_length_s(container, video, sound) * rate))
        return MediaFacts("audio", kind, num_samples=samples, sampling_rate=rate)


def _length_s(container: "InputContainer", video: "VideoStream", sound: "AudioStream") -> float:
    if sound.duration and sound.time_base:
        begin_s = float((sound.start_time or 0) * sound.time_base)
        return begin_s + float(sound.duration * sound.time_base) - _start_s(video)
    return (container.duration or 0) / _MICROSECONDS


def _start_s(video: "VideoStream") -> float:
    return float((video.start_time or 0) * video.time_base) if video.time_base else 0.0


def _of_video(source: MediaSource) -> tuple[npt.NDArray[np.float32], int]:
    """Returns [samples] from the first frame on, cut or padded with silence to the header's length;
    and the sampling rate."""
    import av

    facts = sound_facts(source)
    found = np.zeros(facts.num_samples, np.float32)
    with open_video(source) as (container, video, _):
        to_floats, at = av.AudioResampler(format="fltp"), None
        for frame in container.decode(container.streams.audio[0]):
            if at is None:
                at = round(((frame.time or 0.0) - _start_s(video)) * facts.sampling_rate)
            for part in to_floats.resample(frame):
                block = part.to_ndarray().mean(axis=0, dtype=np.float32)
                inside = block[max(0, -at) : max(0, len(found) - at)]
                found[max(0, at) : max(0, at) + len(inside)] = inside
                at += len(block)
    return found, facts.sampling_rate


@contextmanager
def _open_sound(source: MediaSource) -> Iterator[tuple["SoundFile", MediaKind]]:
    import soundfile

    with source.open_encoded() as (file, name, kind), soundfile.SoundFile(file) as sound:
        if sound.format not in _FORMATS[kind]:
            raise source.make_error(
                f"begins as {name}, and is {sound.format}; replace it, or remove the line"
            )
        yield sound, kind


_FLOOR = 1e-10
"""Power that counts as silence."""
_RANGE = 8.0
"""Dynamic range below the loudest, in powers of ten."""
_AT_ONCE = 4096
"""Frames transformed at a time."""
_HIGHEST_HZ, _BEND_HZ, _BEND_MEL, _STEP = 8000.0, 1000.0, 15.0, np.log(6.4) / 27.0
"""A mel is 200/3 Hz up to the bend, and a logarithmic step beyond it."""


class _Filter(NamedTuple):
    first: int
    """Index of the lowest frequency."""
    weights: npt.NDArray[np.float64]
    """[frequencies, 1]"""


def mel(samples: npt.NDArray[np.float32], audio: AudioRecipe) -> npt.NDArray[np.float32]:
    """Computes the scaled log power, clipped at 8 powers of ten below the loudest.

    Args:
        samples: [samples], more than half of `audio.n_fft`.
        audio: the window length and number of bins.

    Returns:
        [bins, frames]
    """
    padded = np.pad(samples.astype(np.float64), audio.n_fft // 2, mode="reflect")
    every = np.lib.stride_tricks.sliding_window_view(padded, audio.n_fft)[:: audio.hop]
    count = len(samples) // audio.hop
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(audio.n_fft) / audio.n_fft)
    power = np.empty((audio.bins, count))
    for begin in range(0, count, _AT_ONCE):
        end = min(begin + _AT_ONCE, count)
        spectrum = np.fft.rfft(every[begin:end] * window)
        of_all = np.ascontiguousarray((spectrum.real**2 + spectrum.imag**2).T)
        for number, (first, weights) in enumerate(_filters(audio)):
            power[number, begin:end] = (of_all[first : first + len(weights)] * weights).sum(axis=0)
    found = np.log10(np.maximum(power, _FLOOR)).astype(np.float32)
    found = np.maximum(found, found.max() - np.float32(_RANGE))
    return np.asarray((found + np.float32(4)) / np.float32(4))


@lru_cache(maxsize=4)
def _filters(audio: AudioRecipe) -> list[_Filter]:
    """Triangles between neighbours on the mel scale, of equal area."""
    frequencies = np.linspace(0, audio.sampling_rate // 2, 1 + audio.n_fft // 2)
    highest = _BEND_MEL + np.log(_HIGHEST_HZ / _BEND_HZ) / _STEP
    mels = np.linspace(0, highest, audio.bins + 2)
    linear = mels * _BEND_HZ / _BEND_MEL
    corners = np.where(mels < _BEND_MEL, linear, _BEND_HZ * np.exp(_STEP * (mels - _BEND_MEL)))
    found = []
    for left, top, right in zip(corners, corners[1:], corners[2:], strict=False):
        rising, falling = (frequencies - left) / (top - left), (right - frequencies) / (right - top)
        weights = np.maximum(0, np.minimum(rising, falling)) * 2 / (right - left)
        (inside,) = weights.nonzero()
        first, end = (inside[0], inside[-1] + 1) if len(inside) else (0, 0)
        found.append(_Filter(int(first), weights[first:end, None]))
    return found
