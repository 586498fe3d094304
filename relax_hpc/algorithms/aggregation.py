"""Weighs rows and tokens, which defines the mean in a loss.

A loss is the sum of `token_weights` times its trained tokens' losses, divided by the sum of
`counts` over rows with a trained token. Row weights are known before any row is read; a mean over
sequences divides by the trained tokens where a row is read. A mean over prompts divides by L, all
response tokens, including masked ones and tools', since a prompt's rows are read in several places.

Most episodes are one row. With several, a mean over tokens treats them as one row, and a mean over
sequences counts each row.
"""

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.algorithms.part import Tokens
from relax_hpc.algorithms.ratios import sequence_sums

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token", "sequence", "sequence_sum", "prompt", "constant"]
Floats = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]


class RowWeights(NamedTuple):
    """[R] each."""

    weights: Floats
    """Factor of its tokens' losses."""
    counts: Floats
    """Share of the denominator, row by row."""


def row_weights(
    aggregation: Aggregation, lengths: Lengths, groups: Lengths, longest: int
) -> RowWeights | None:
    """Returns the weights of trained rows; None if all tokens count the same.

    token: the mean over trained tokens. sequence: of the means of rows over their trained tokens
    (GRPO, arXiv:2402.03300), which `token_weights` makes from the sums. sequence_sum: of the sums
    of rows. prompt: of the means over all tokens of a prompt (DAPO, arXiv:2503.14476; ScaleRL,
    arXiv:2510.13786). constant: of the sums of rows, divided by the same number for all (Dr. GRPO,
    arXiv:2503.20783).

    Args:
        lengths: [R] L.
        groups: [R] prompt of each row.
        longest: the number for "constant".
    """
    ones = np.ones(len(lengths))
    if aggregation == "token":
        return None
    if aggregation in ("sequence", "sequence_sum"):
        return RowWeights(ones, ones)
    if aggregation == "constant":
        return RowWeights(ones / longest, ones)
    of_prompt = np.maximum(np.bincount(groups, lengths), 1)
    return RowWeights(1 / of_prompt[groups], 1 / np.bincount(groups)[groups])


def token_weights(aggregation: Aggregation, tokens: Tokens) -> "Tensor | None":
    """Returns the [T] factor of each trained token's loss; None if tokens count the same.

    Every sequence is complete here. One without trained tokens is not divided.
    """
    weights = tokens.columns.get("weights")
    if weights is None or aggregation != "sequence":
        return weights
    trained = sequence_sums(weights.new_ones(weights.shape), tokens)
    return weights / trained.clamp(min=1)
