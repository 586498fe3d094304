"""Searches a threshold determined by the whole batch, on all ranks at once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_hpc.algorithms.part import Total
from relax_hpc.algorithms.ratios import LARGEST

if TYPE_CHECKING:
    from torch import Tensor

_PARTS, _ROUNDS = 1 << 14, 3
"""[0, 20] is divided into parts, one of which is divided again: to 5e-12, with three reductions."""


def largest(squares: "Sequence[Tensor]", budget: float, total: Total) -> "Tensor":
    """Returns [] float64, the largest x in [0, 20] for which the mean of min(squares, x^2) is <=
    budget.

    Args:
        squares: of all micro-batches; infinite values do not count.
        budget: for the mean over those that count.
        total: sums over the ranks.
    """
    import torch

    # Sorted, a mean is told by one place: the sum up to there, and how many come after. Nothing
    # here waits for a GPU.
    here = torch.cat([values.double() for values in squares]).sort().values
    below = torch.cat([here.new_zeros(1), here.cumsum(0)])
    count = here.isfinite().sum()
    allowed = budget * total(count.double())
    low, width = torch.zeros_like(allowed), LARGEST
    parts = torch.arange(1, _PARTS, dtype=low.dtype, device=low.device)
    for _ in range(_ROUNDS):
        width /= _PARTS
        limits = torch.add(low, parts, alpha=width).square()
        smaller = torch.searchsorted(here, limits)
        sums = total(below[smaller].addcmul(count - smaller, limits))
        low = torch.add(low, (sums <= allowed).sum(), alpha=width)
    return low
