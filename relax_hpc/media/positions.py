"""Positions of tokens in time, y and x (M-RoPE), by the spans of media.

Nothing is looked for in the token ids, so a placeholder that a policy samples is text.

Source: `get_rope_index` of transformers' Qwen3-VL and Qwen3-Omni.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from relax_hpc.media.expand import Span
from relax_hpc.media.extent import Extent
from relax_hpc.media.recipe import Recipe

Positions = npt.NDArray[Any]
"""int64 or float32."""


def positions(
    num_tokens: int, spans: Sequence[Span], extents: Sequence[Extent], recipe: Recipe
) -> Positions:
    """Computes the positions of a row: of the prompt, and of text that follows it.

    Args:
        num_tokens: of the row.
        spans: of its media, by first token.
        extents: of its media.
        recipe: of the model.

    Returns:
        [3, num_tokens] in time, y and x. Whole numbers; float32 of a family that is timed, whose
        positions of videos lie between whole numbers.
    """
    found = np.empty((3, num_tokens), np.float32 if recipe.family.is_timed else np.int64)
    done, after = 0, found.dtype.type(0)
    for span in spans:
        grid, step = _grid(extents[span.medium], recipe)
        if grid is None:  # sound is counted as text is
            continue
        after = _text(found, done, span.first, after)
        done = span.first + span.tokens
        found[:, span.first : done] = _vision(grid, step, found.dtype) + after
        after = found[:, span.first : done].max() + found.dtype.type(1)
    _text(found, done, num_tokens, after)
    return found


def next_position(found: Positions) -> float:
    """Returns the position of the token that follows a row; of sampled tokens each adds 1."""
    return float(found.max()) + 1


def _text(found: Positions, first: int, end: int, start: Any) -> Any:  # noqa: ANN401
    """Counts on from `start`, alike in all three, and returns the next one."""
    found[:, first:end] = np.arange(end - first, dtype=found.dtype) + start
    return found.dtype.type(start + (end - first))


def _grid(extent: Extent, recipe: Recipe) -> tuple[tuple[int, int, int] | None, np.float32]:
    """Tokens in time, y and x, and positions from one to the next in time."""
    if extent.modality == "audio":
        return None, np.float32(0)
    vision = recipe.image if extent.modality == "image" else recipe.video.vision
    time, height, width = extent.grid
    frames = 1 if len(extent.tokens) > 1 else time
    step = np.float32(extent.seconds_per_grid) * np.float32(recipe.positions_per_s)
    return (frames, height // vision.merge, width // vision.merge), step


def _vision(grid: tuple[int, int, int], step: np.float32, dtype: np.dtype[Any]) -> Positions:
    time, y, x = np.meshgrid(*(np.arange(count) for count in grid), indexing="ij")
    found = np.stack([time.ravel(), y.ravel(), x.ravel()]).astype(dtype)
    if dtype == np.float32:
        found[0] *= step
    return found
