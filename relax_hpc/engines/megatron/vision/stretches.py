"""Rows with media -> the places of features in a packed micro-batch, and positions in space.

A row's spans alone say what stands for features: a placeholder that a policy samples is text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_hpc.errors import TrainingError
from relax_hpc.media.expand import Span
from relax_hpc.media.extent import Extent
from relax_hpc.media.kinds import modality_of
from relax_hpc.media.positions import positions
from relax_hpc.media.recipe import Recipe
from relax_hpc.schema import Row, key_of_medium

Key = bytes
"""Identity of a medium, see `schema.key_of_medium`."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of a micro-batch, and the features that they stand for."""

    row: Row
    medium: int
    """Place of the medium in the row."""
    first: int
    """Token of the micro-batch."""
    tokens: int
    offset: int
    """Feature of the medium that the first token stands for."""

    @property
    def key(self) -> Key:
        return key_of_medium(self.row, self.medium)

    @property
    def features(self) -> int:
        """Features of the medium, by all its stretches in the row."""
        spans = self.row.media_spans
        return int(spans[spans[:, 0] == self.medium, 2].sum())

    @property
    def is_heard(self) -> bool:
        return modality_of(self.row.media[self.medium]) == "audio"


def stretches(rows: Sequence[Row], recipe: Recipe) -> tuple[Stretch, ...]:
    """Finds the stretches of rows that are packed end to end.

    Raises:
        TrainingError: the spans of a medium do not fit its grid, or the row.
    """
    found, start = [], 0
    for row in rows:
        done = [0] * len(row.media)
        for medium, first, tokens in row.media_spans.tolist():
            if not 0 <= first <= first + tokens <= len(row.token_ids):
                raise TrainingError(_where(row, medium, f"ends beyond token {len(row.token_ids)}"))
            found.append(Stretch(row, medium, start + first, tokens, done[medium]))
            done[medium] += tokens
        for medium, (of, tokens) in enumerate(zip(row.media, done, strict=True)):
            time, height, width = of.grid_thw
            features = time * height * width // recipe.image.merge**2
            if features and tokens not in (0, features):  # of sound the array will say it
                what = f"has {features} features, and its spans {tokens} tokens"
                raise TrainingError(_where(row, medium, what))
        start += len(row.token_ids)
    return tuple(found)


def _where(row: Row, medium: int, what: str) -> str:
    return f"guid {row.guid}, sibling {row.sibling}: medium {medium} {what}"


def position_ids(rows: Sequence[Row], padding: int, recipe: Recipe) -> Tensor:
    """[T, 3] positions in time, y and x, from 0 in each document.

    Args:
        padding: tokens of one more document, of text.
    """
    parts = [_of_row(row, recipe) for row in rows]
    parts.append(np.broadcast_to(np.arange(padding), (3, padding)))
    return torch.from_numpy(np.concatenate(parts, axis=1).T.copy())


def _of_row(row: Row, recipe: Recipe) -> npt.NDArray[np.generic]:
    spans = [Span(*each) for each in row.media_spans.tolist()]
    extents = [
        Extent(
            modality_of(medium),
            tuple(span.tokens for span in spans if span.medium == number),
            grid=medium.grid_thw,
            seconds_per_grid=medium.seconds_per_grid,
        )
        for number, medium in enumerate(row.media)
    ]
    return positions(len(row.token_ids), spans, extents, recipe)
