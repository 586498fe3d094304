"""Sound: WAV, FLAC, MP3 and OGG to samples of one channel."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from relax_hpc.media.facts import Facts
from relax_hpc.media.limits import MOST_CHANNELS
from relax_hpc.media.recipe import Audio
from relax_hpc.media.source import Source
from relax_hpc.schema import MediaKind

if TYPE_CHECKING:
    from soundfile import SoundFile

_SILENT = 2**-15
"""Amplitude below which 16 bits hold nothing."""


def read_facts(source: Source) -> Facts:
    """Reads the header.

    Raises:
        ConfigError: it is no sound, or has more than two channels.
    """
    with _opened(source) as (sound, kind):
        if sound.channels > MOST_CHANNELS:
            raise source.refused(
                f"has {sound.channels} channels; mix it down to one or two, e.g. ffmpeg -i it -ac 1"
            )
        return Facts("audio", kind, num_samples=sound.frames, sampling_rate=sound.samplerate)


def decoded(source: Source, audio: Audio) -> npt.NDArray[np.float32]:
    """Decodes it to the mean of its channels, at the rate of the recipe.

    Returns:
        [samples], of [-1, 1].

    Raises:
        ConfigError: it is damaged, or silent.
    """
    with _opened(source) as (sound, _):
        rate = sound.samplerate
        samples = sound.read(dtype="float32", always_2d=True).mean(axis=1, dtype=np.float32)
    if not len(samples) or np.abs(samples).max() < _SILENT:
        raise source.refused("is silent; replace it, or remove the line")
    if rate != audio.sampling_rate:
        import soxr

        samples = soxr.resample(samples, rate, audio.sampling_rate, quality="HQ")
    return np.ascontiguousarray(samples, np.float32)


@contextmanager
def _opened(source: Source) -> Iterator[tuple["SoundFile", MediaKind]]:
    import soundfile

    with source.opened() as file:
        encoding = source.encoding(file)
        with source.decoding(encoding), soundfile.SoundFile(file) as sound:
            assert encoding.kind is not None
            yield sound, encoding.kind
