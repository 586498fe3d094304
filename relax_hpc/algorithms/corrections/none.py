"""No correction."""

from typing import Literal

from relax_hpc.algorithms.part import Correction


class NoCorrection(Correction):
    """Every token weighs the same."""

    name: Literal["none"] = "none"
