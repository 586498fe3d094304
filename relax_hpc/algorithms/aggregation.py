"""The mean that a loss is: the weight of each row, known before any is read, and of its tokens.

A loss sums `token_weights` times the losses of its trained tokens; its denominator is the sum of
`counts` over rows that have one. How many tokens of a row are trained is known only where it is
read, and there a mean over sequences divides by it. The rows of a prompt are read in several
places: a mean over prompts divides by L, the response tokens of rows, tools' and masked ones, too.

Most episodes are one row. Where one is several, a mean over tokens counts it by its tokens, as if
they were one row, and a mean over sequences counts each of its rows.
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
    """Factor of the losses of its tokens."""
    counts: Floats
    """Part of the denominator that the row is."""


def row_weights(
    aggregation: Aggregation, lengths: Lengths, groups: Lengths, longest: int
) -> RowWeights | None:
    """The weights of rows that are trained on; None if tokens count the same.

    token: the mean over trained tokens. sequence: of the means of rows over their trained tokens
    (GRPO, arXiv:2402.03300), which `token_weights` makes of the sums. sequence_sum: of the sums of
    rows. prompt: of the means over all tokens of a prompt (DAPO, arXiv:2503.14476; ScaleRL,
    arXiv:2510.13786). constant: of the sums of rows, by a number that is the same for all (Dr.
    GRPO, arXiv:2503.20783).

    Args:
        aggregation: the mean.
        lengths: [R] L.
        groups: [R] prompt of each row.
        longest: the number of "constant".
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
    """[T] factor of each trained token's loss; None if tokens count the same.

    Every sequence is here as a whole. One that has no trained token divides by none.
    """
    weights = tokens.columns.get("weights")
    if weights is None or aggregation != "sequence":
        return weights
    trained = sequence_sums(weights.new_ones(weights.shape), tokens)
    return weights / trained.clamp(min=1)
