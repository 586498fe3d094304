"""The mean that a loss is: the weight of each row's tokens, known before any is read.

A loss sums `weights` times the parts of its tokens; its denominator is the number of rows. L are
the response tokens of a row, G the rows of a prompt. Where tokens of a response are masked, the
rest keeps its weight.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]


def sequence_mean(lengths: Lengths) -> Floats:
    """[P, G] 1 / L: every row counts the same (GRPO, arXiv:2402.03300)."""
    return np.asarray(1 / np.maximum(lengths, 1), np.float64)


def prompt_mean(lengths: Lengths) -> Floats:
    """[P, G] 1 / mean L of the group: every prompt counts the same (DAPO, arXiv:2503.14476)."""
    mean = np.maximum(lengths.mean(axis=1, keepdims=True), 1)
    return np.asarray(np.broadcast_to(1 / mean, lengths.shape), np.float64)


def constant(lengths: Lengths, length: int) -> Floats:
    """[P, G] 1 / `length`, whatever L is (Dr. GRPO, arXiv:2503.20783)."""
    return np.full(lengths.shape, 1 / length)
