"""Computes sums and means over the sequences, or other parts, of a packed micro-batch."""

import torch
from torch import Tensor


def sum_over(values: Tensor, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    """Returns [count] sums of [T] `values` under the mask, by [T] `ids`; masked garbage has no
    effect.

    Without tokens a sum is 0; gradients go only to its own tokens.
    """
    kept = torch.where(mask, values, 0)
    return kept.new_zeros(count).index_add(0, ids, kept)


def mean_over(values: Tensor, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    """Divides `sum_over` by the number of tokens under the mask; 0 if there are none."""
    numbers = values.new_zeros(count).index_add(0, ids, mask.to(values.dtype))
    return sum_over(values, ids, mask, count) / numbers.clamp(min=1)


def spread_to(ids: Tensor, of_sequences: Tensor) -> Tensor:
    """Returns [T] the value of each token's sequence; its gradient uses `sum_over`.

    The gradient of `of_sequences[ids]` would be sorted, then summed by one thread per sequence: for
    a single long one that took longer than the rest of a loss.
    """
    return of_sequences.index_select(0, ids)


def rest_over(values: Tensor, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    """Returns [T] the sum of `values` over a token and later ones of its sequence, under the mask.

    Sequences lie end to end; their ids may be in any order.
    """
    kept = torch.where(mask, values, 0).double()
    so_far, at = kept.cumsum(0), torch.arange(len(ids), device=ids.device)
    last = torch.zeros(count, dtype=torch.int64, device=ids.device).scatter_reduce(
        0, ids, at, "amax"
    )
    return (so_far[last][ids] - so_far + kept).to(values.dtype)
