"""The mean that a loss is: the weight of each row's tokens, known before any is read.

A loss sums `weights` times the parts of its tokens; its denominator is the number of rows, R. L are
the response tokens of a row, G the episodes of a prompt. Where tokens of a response are masked, the
rest keeps its weight.

Most episodes are one row. Where one is several, a mean over tokens counts it by its tokens, as if
they were one row, and a mean over sequences counts each of its rows.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]


def sequence_mean(lengths: Lengths) -> Floats:
    """[R] 1 / L: every row counts the same (GRPO, arXiv:2402.03300)."""
    return np.asarray(1 / np.maximum(lengths, 1), np.float64)


def prompt_mean(lengths: Lengths, groups: Lengths, siblings: int) -> Floats:
    """[R] G / sum L of the group: every prompt counts the same (DAPO, arXiv:2503.14476).

    Args:
        lengths: [R]
        groups: [R] prompt of each row, from 0.
        siblings: G.
    """
    mean = np.maximum(np.bincount(groups, lengths) / siblings, 1)
    return np.asarray(1 / mean[groups], np.float64)


def constant(lengths: Lengths, length: int) -> Floats:
    """[R] 1 / `length`, whatever L is (Dr. GRPO, arXiv:2503.20783)."""
    return np.full(lengths.shape, 1 / length)
