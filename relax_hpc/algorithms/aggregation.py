"""The mean that a loss is: the weight of each row's tokens, known before any is read.

A loss sums `weights` times the losses of its tokens; its denominator is the sum of `counts` over
rows that have a trained token. L are the response tokens of a row, tools' among them. Where tokens
of a response are masked, the rest keeps its weight.

Most episodes are one row. Where one is several, a mean over tokens counts it by its tokens, as if
they were one row, and a mean over sequences counts each of its rows.
"""

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Aggregation = Literal["token", "sequence", "sequence_sum", "prompt", "constant"]
Floats = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]


class RowWeights(NamedTuple):
    """[R] each."""

    weights: Floats
    """Factor of each token's loss."""
    counts: Floats
    """Part of the denominator that the row is."""


def row_weights(
    aggregation: Aggregation, lengths: Lengths, groups: Lengths, longest: int
) -> RowWeights | None:
    """The weights of rows that are trained on; None if tokens count the same.

    token: the mean over trained tokens. sequence: of the means of rows (GRPO, arXiv:2402.03300).
    sequence_sum: of the sums of rows. prompt: of the means over all tokens of a prompt (DAPO,
    arXiv:2503.14476; ScaleRL, arXiv:2510.13786). constant: of the sums of rows, by a number that is
    the same for all (Dr. GRPO, arXiv:2503.20783).

    Args:
        aggregation: the mean.
        lengths: [R] L.
        groups: [R] prompt of each row.
        longest: the number of "constant".
    """
    ones = np.ones(len(lengths))
    if aggregation == "token":
        return None
    if aggregation == "sequence":
        return RowWeights(1 / np.maximum(lengths, 1), ones)
    if aggregation == "sequence_sum":
        return RowWeights(ones, ones)
    if aggregation == "constant":
        return RowWeights(ones / longest, ones)
    of_prompt = np.maximum(np.bincount(groups, lengths), 1)
    return RowWeights(1 / of_prompt[groups], 1 / np.bincount(groups)[groups])
