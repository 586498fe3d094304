"""Statistics over the siblings of a prompt; those without a reward (NaN) are in none of them."""

import numpy as np

from relax_hpc.algorithms.part import Floats


def centred(rewards: Floats) -> Floats:
    """[P, G] float64, R less the mean of its group; 0 where there is no reward, and of equals."""
    exact = rewards.astype(np.float64)  # so that the mean of equal ones is what they are
    return np.where(np.isnan(exact), 0.0, exact - means(exact))


def means(rewards: Floats) -> Floats:
    """[P, 1] float64, the mean of each group; 0 where nobody has a reward."""
    exact = rewards.astype(np.float64)
    return np.asarray(np.nansum(exact, axis=1, keepdims=True) / np.maximum(counts(rewards), 1))


def counts(rewards: Floats) -> Floats:
    """[P, 1] siblings with a reward."""
    return np.asarray(np.isfinite(rewards).sum(axis=1, keepdims=True), np.float64)


def deviation(centres: Floats, number: Floats) -> Floats:
    """Standard deviation over the last axis: the root of the squares' sum by `number` - 1."""
    squares = np.square(centres).sum(axis=-1, keepdims=True)
    return np.asarray(np.sqrt(squares / np.maximum(number - 1, 1)))
