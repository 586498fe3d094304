"""Positions of tokens in time, y and x (M-RoPE), by the spans of media.

Nothing is looked for in the token ids, so a placeholder that a policy samples is text.

Source: `get_rope_index` of transformers' Qwen3-VL and Qwen3-Omni. Qwen3-Omni's times lie between
whole numbers. transformers turns by these; SGLang looks up turns by whole numbers, and so cuts off
what is behind the point. Trainers have to do as the engine does, so positions are cut off here.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from relax_hpc.media.expand import Span
from relax_hpc.media.extent import Extent
from relax_hpc.media.recipe import Recipe

Positions = npt.NDArray[np.int64]
_Exact = npt.NDArray[np.float32]


def positions(
    num_tokens: int, spans: Sequence[Span], extents: Sequence[Extent], recipe: Recipe
) -> Positions:
    """Computes the positions of a row: of the prompt, and of text that follows it.

    Args:
        num_tokens: of the row.
        spans: of its media, by first token. A sound whose stretches join on to those of the video
            before it is the video's, and begins with it.
        extents: of its media.
        recipe: of the model.

    Returns:
        [3, num_tokens] in time, y and x.
    """
    found = np.empty((3, num_tokens), np.float32)
    done, after = 0, np.float32(0)
    seen: Counter[int] = Counter()
    joined: Sequence[int] = ()
    for span in spans:
        extent, end = extents[span.medium], span.first + span.tokens
        if not (span.first == done and span.medium in joined):
            joined = ()
            if extent.modality == "audio":  # alone, it is counted as text is
                continue
            after = begin = _text(found, done, span.first, after)
            joined = _with_its_sound(span.medium, extents)
        part = _part(extent, seen[span.medium], span.tokens, recipe)
        found[:, span.first : end] = part + begin
        seen[span.medium] += span.tokens
        done, after = end, found[:, end - 1].max() + np.float32(1)
    _text(found, done, num_tokens, after)
    return np.floor(found).astype(np.int64)


def next_position(found: Positions) -> int:
    """Returns the position of the token that follows a row; of sampled tokens each adds 1."""
    return int(found[:, -1].max()) + 1


def _with_its_sound(medium: int, extents: Sequence[Extent]) -> Sequence[int]:
    """A video and the sound after it, whose stretches may join on; nothing of another medium."""
    kinds = [extent.modality for extent in extents[medium : medium + 2]]
    return (medium, medium + 1) if kinds == ["video", "audio"] else ()


def _text(found: _Exact, first: int, end: int, start: np.float32) -> np.float32:
    """Counts on from `start`, alike in all three, and returns the next one."""
    found[:, first:end] = np.arange(end - first, dtype=np.float32) + start
    return np.float32(start + (end - first))


def _part(extent: Extent, first: int, tokens: int, recipe: Recipe) -> _Exact:
    """[3, tokens] of a stretch, from the beginning of its medium.

    Args:
        extent: of the medium.
        first: token of the medium that it begins with; of frames it has whole ones.
        tokens: of it.
        recipe: of the model.
    """
    if extent.modality == "audio":
        return np.broadcast_to(np.arange(first, first + tokens, dtype=np.float32), (3, tokens))
    vision = recipe.image if extent.modality == "image" else recipe.video.vision
    height, width = (patches // vision.merge for patches in extent.grid[1:])
    frame = height * width
    begin = 0 if recipe.family.frame else first // frame  # frames that are written count as text
    times = np.arange(begin, begin + tokens // frame, dtype=np.float32)
    times = times * np.float32(extent.seconds_per_grid) * np.float32(recipe.positions_per_s)
    rows, columns = (np.arange(count, dtype=np.float32) for count in (height, width))
    return np.stack(np.meshgrid(times, rows, columns, indexing="ij")).reshape(3, -1)
