"""Entropy in the loss."""

from typing import Literal

from relax_hpc.algorithms.part import Part


class NoEntropy(Part):
    """Entropy is only measured."""

    name: Literal["none"] = "none"
