"""Mel spectrum of sound, as Whisper's preprocessor makes it, in numpy alone.

It is computed in float64 and without products of matrices, whose sums depend on the processor: any
two nodes and versions of a library make the same array of the same samples, and so one digest.

Source: `WhisperFeatureExtractor` of transformers, of one sound by itself; its mel scale is that of
M. Slaney, Auditory Toolbox (1998).
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.media.recipe import Audio

_FLOOR = 1e-10
"""Power that counts as silence."""
_RANGE = 8.0
"""Powers of ten below the loudest that are told apart."""
_AT_ONCE = 4096
"""Frames that are transformed at a time."""
_HIGHEST_HZ, _BEND_HZ, _BEND_MEL, _STEP = 8000.0, 1000.0, 15.0, np.log(6.4) / 27.0
"""A mel is 200/3 Hz up to the bend; from there on each is a step of the logarithm."""


class _Filter(NamedTuple):
    first: int
    """Frequency where it begins."""
    weights: npt.NDArray[np.float64]
    """[frequencies, 1]"""


def mel(samples: npt.NDArray[np.float32], audio: Audio) -> npt.NDArray[np.float32]:
    """Computes the logarithm of power, from -8 powers of ten below the loudest, scaled.

    Args:
        samples: [samples], more than half of `audio.n_fft`.
        audio: how long windows are, and how many bins there are.

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
def _filters(audio: Audio) -> list[_Filter]:
    """Triangles between neighbours on the mel scale, each of the same area."""
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
