"""The reward minus its group's length-weighted mean."""

from typing import Literal

import numpy as np

from relax_hpc.algorithms.part import Advantage, Floats, Needs, Rows


class Opo(Advantage):
    """A = R - sum(l R) / sum(l) over the siblings of a prompt, l their tokens.

    The baseline of least variance, if the squared norm of a response's gradient grows as its
    length. Source: OPO (arXiv:2505.23585), whose authors' code is verl's. verl counts trained
    tokens, ours all after the prompt: an environment's, too. A group of equals is worth 0.
    """

    name: Literal["opo"] = "opo"

    def needs(self) -> Needs:
        return Needs(scope="group", min_siblings=2)

    def of_groups(self, rows: Rows) -> Floats:
        exact = rows.rewards.astype(np.float64)
        there = np.isfinite(exact)
        lengths = np.where(there, np.maximum(rows.lengths, 1), 0)
        # Distances from one of them, so that equal ones are exactly worth 0.
        least = np.where(there, exact, np.inf).min(axis=1, keepdims=True)
        above = np.where(there, exact - np.where(np.isfinite(least), least, 0), 0)
        baseline = (lengths * above).sum(axis=1, keepdims=True)
        baseline /= np.maximum(lengths.sum(axis=1, keepdims=True), 1)
        return np.where(there, above - baseline, 0).astype(rows.rewards.dtype)
