"""Sums and means over the sequences of a packed micro-batch, or over any other parts of it."""

import torch
from torch import Tensor


def sum_over(values: Tensor, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    """[count] sums of [T] `values` under the mask, by [T] `ids`; garbage elsewhere is inert.

    One that has no token is 0, and the gradient goes to its own tokens alone.
    """
    kept = torch.where(mask, values, 0)
    return kept.new_zeros(count).index_add(0, ids, kept)


def mean_over(values: Tensor, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    """Divides `sum_over` by the tokens under the mask; 0 where there is none."""
    numbers = values.new_zeros(count).index_add(0, ids, mask.to(values.dtype))
    return sum_over(values, ids, mask, count) / numbers.clamp(min=1)


def spread_to(ids: Tensor, of_sequences: Tensor) -> Tensor:
    """[T] value of each token's sequence; its gradient adds up as `sum_over` does.

    The gradient of `of_sequences[ids]` is sorted first, and then added up by one thread for each
    sequence: with a single long one that took longer than all else of a loss.
    """
    return of_sequences.index_select(0, ids)


def rest_over(values: Tensor, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    """[T] sum of `values` over a token and those after it in its sequence, under the mask.

    Sequences lie end to end; in whichever order their numbers are.
    """
    kept = torch.where(mask, values, 0).double()
    so_far, at = kept.cumsum(0), torch.arange(len(ids), device=ids.device)
    last = torch.zeros(count, dtype=torch.int64, device=ids.device).scatter_reduce(
        0, ids, at, "amax"
    )
    return (so_far[last][ids] - so_far + kept).to(values.dtype)
