"""Windows of sound: the stretches of a mel spectrum that are heard by themselves.

A sound is cut into chunks of `CHUNK` mel frames, which convolutions make tokens of, each chunk by
itself. So many chunks are a window: what is in it is attended to from nowhere else. So a sound's
windows can be computed apart from each other, and in any order.
"""

from typing import NamedTuple

CHUNK = 100
"""Mel frames of a chunk."""
CHUNK_TOKENS = 13
"""Tokens of a whole chunk; `tokens_of` it."""


class Window(NamedTuple):
    """Consecutive mel frames of a sound."""

    frames: int
    room: int
    """Frames that each of its chunks is filled up to, with zeros: `CHUNK`, or those of the sound
    where it has fewer. Convolutions see what is behind the last frame."""

    @property
    def tokens(self) -> int:
        whole, rest = divmod(self.frames, CHUNK)
        return whole * CHUNK_TOKENS + tokens_of(rest)


def tokens_of(frames: int) -> int:
    """Tokens of a chunk, or of a part of one; the convolutions halve it three times."""
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


def windows_of(frames: int, chunks: int) -> list[Window]:
    """Cuts a sound.

    Args:
        frames: of its mel spectrum, at least 1.
        chunks: of a window.
    """
    size, room = chunks * CHUNK, min(frames, CHUNK)
    return [Window(min(size, frames - begin), room) for begin in range(0, frames, size)]
