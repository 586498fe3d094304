"""Sound: WAV, FLAC, MP3 and OGG, and that of videos, to samples of one channel."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from relax_hpc.media import videos
from relax_hpc.media.facts import Facts
from relax_hpc.media.limits import MOST_CHANNELS
from relax_hpc.media.recipe import Audio
from relax_hpc.media.source import Source
from relax_hpc.schema import MediaKind

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream
    from soundfile import SoundFile

_SILENT = 2**-15
"""Amplitude below which 16 bits hold nothing."""
_MICROSECONDS = 1e6


def read_facts(source: Source) -> Facts:
    """Reads the header; of a video without sound there are no samples.

    Raises:
        ConfigError: it is no sound, or has more than two channels.
    """
    if source.is_of_video:
        return _facts_of_video(source)
    with _opened(source) as (sound, kind):
        _check_channels(source, sound.channels)
        return Facts("audio", kind, num_samples=sound.frames, sampling_rate=sound.samplerate)


def decoded(source: Source, audio: Audio) -> npt.NDArray[np.float32]:
    """Decodes it to the mean of its channels, at the rate of the recipe.

    Returns:
        [samples], of [-1, 1].

    Raises:
        ConfigError: it is damaged, or silent, or has samples that are no numbers; the sound of a
            video may be silent.
    """
    samples, rate = _of_video(source) if source.is_of_video else _of_sound(source)
    if rate != audio.sampling_rate:
        import soxr

        samples = soxr.resample(samples, rate, audio.sampling_rate, quality="HQ")
    if not np.isfinite(samples).all():
        raise source.refused(
            "has samples that are infinite or no numbers; write it again in 16 bits, e.g. "
            "ffmpeg -i it it.flac"
        )
    return np.ascontiguousarray(samples, np.float32)


def _of_sound(source: Source) -> tuple[npt.NDArray[np.float32], int]:
    """[samples], and how many there are a second."""
    with _opened(source) as (sound, _):
        rate = sound.samplerate
        samples = sound.read(dtype="float32", always_2d=True).mean(axis=1, dtype=np.float32)
    if not len(samples) or np.abs(samples).max() < _SILENT:
        raise source.refused("is silent; replace it, or remove the line")
    return samples, rate


def _check_channels(source: Source, channels: int) -> None:
    if channels > MOST_CHANNELS:
        raise source.refused(
            f"has {channels} channels; mix it down to one or two, e.g. ffmpeg -i it -ac 1"
        )


def _facts_of_video(source: Source) -> Facts:
    """The sound lasts from the first frame of the video to its own end, as the header says it."""
    with videos.opened(source) as (container, video, kind):
        if not container.streams.audio:
            return Facts("audio", kind)
        sound = container.streams.audio[0]
        _check_channels(source, sound.codec_context.channels)
        rate = sound.codec_context.sample_rate
        samples = max(0, round(_length_s(container, video, sound) * rate))
        return Facts("audio", kind, num_samples=samples, sampling_rate=rate)


def _length_s(container: "InputContainer", video: "VideoStream", sound: "AudioStream") -> float:
    if sound.duration and sound.time_base:
        begin_s = float((sound.start_time or 0) * sound.time_base)
        return begin_s + float(sound.duration * sound.time_base) - _start_s(video)
    return (container.duration or 0) / _MICROSECONDS


def _start_s(video: "VideoStream") -> float:
    return float((video.start_time or 0) * video.time_base) if video.time_base else 0.0


def _of_video(source: Source) -> tuple[npt.NDArray[np.float32], int]:
    """[samples] from the first frame on, as many as the header says: cut, or silent where the
    stream begins later or ends before; and how many there are a second."""
    import av

    facts = read_facts(source)
    found = np.zeros(facts.num_samples, np.float32)
    with videos.opened(source) as (container, video, _):
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
def _opened(source: Source) -> Iterator[tuple["SoundFile", MediaKind]]:
    import soundfile

    with source.opened() as file:
        encoding = source.encoding(file)
        with source.decoding(encoding), soundfile.SoundFile(file) as sound:
            assert encoding.kind is not None
            yield sound, encoding.kind
