"""A threshold that the values of a whole batch decide, on all ranks at once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_hpc.algorithms.part import Total
from relax_hpc.algorithms.ratios import LARGEST

if TYPE_CHECKING:
    from torch import Tensor

_PARTS, _ROUNDS = 17, 10
"""[0, 20] is cut into parts, of which one is cut again: to 1e-11, by 10 sums over the ranks."""


def largest(squares: "Sequence[Tensor]", budget: float, total: Total) -> "Tensor":
    """[] float64, the largest x in [0, 20] for which the mean of min(squares, x^2) is <= budget."""
    import torch

    here = torch.cat([values.double() for values in squares])
    allowed = budget * total(torch.ones_like(here).sum())
    low, width = torch.zeros_like(allowed), LARGEST
    inner = torch.arange(1, _PARTS, dtype=low.dtype, device=low.device)[:, None]
    for _ in range(_ROUNDS):
        width /= _PARTS
        sums = total(here.minimum((low + width * inner).square()).sum(dim=1))
        low = low + width * (sums <= allowed).sum(dtype=low.dtype)
    return low
