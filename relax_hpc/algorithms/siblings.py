"""Computes statistics over the siblings of a prompt, ignoring missing rewards (NaN)."""

import numpy as np

from relax_hpc.algorithms.part import Floats


def center(rewards: Floats) -> Floats:
    """[P, G] float64, R minus its group's mean; 0 without a reward, and for equal rewards."""
    exact = rewards.astype(np.float64)  # so that the mean of equal ones is what they are
    return np.where(np.isnan(exact), 0.0, exact - means(exact))


def means(rewards: Floats) -> Floats:
    """[P, 1] float64, the mean of each group; 0 without rewards."""
    exact = rewards.astype(np.float64)
    return np.asarray(np.nansum(exact, axis=1, keepdims=True) / np.maximum(counts(rewards), 1))


def counts(rewards: Floats) -> Floats:
    """[P, 1] siblings with a reward."""
    return np.asarray(np.isfinite(rewards).sum(axis=1, keepdims=True), np.float64)


def deviation(centres: Floats, number: Floats) -> Floats:
    """Standard deviation over the last axis, dividing by `number` - 1."""
    squares = np.square(centres).sum(axis=-1, keepdims=True)
    return np.asarray(np.sqrt(squares / np.maximum(number - 1, 1)))
