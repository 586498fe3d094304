"""REINFORCE++: returns, whitened over the tokens of the batch."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from relax_hpc.algorithms.part import Advantage, Floats, Needs, Rows, Tokens, Total

_EPS = 1e-8
"""Added to the variance, as in verl and OpenRLHF."""


class ReinforcePp(Advantage):
    """A_t = (G_t - mean(G)) / std(G) over all trained tokens of the batch, G_t = R - the KL
    penalty.

    With `algorithm.kl.place = "reward"`, G_t = R - beta * sum of k1 over this token and those after
    it. No group is needed; rows of equal rewards teach, too. The variance divides by N - 1. Source:
    REINFORCE++ (arXiv:2501.03262), its ninth version; verl and slime agree (with gamma = 1).
    """

    name: Literal["reinforce_pp"] = "reinforce_pp"

    def needs(self) -> Needs:
        return Needs(scope="batch", prepass=True, every_row=True)

    def of_groups(self, rows: Rows) -> Floats:
        return np.nan_to_num(rows.rewards)

    def prepare(self, batches: Sequence[Tokens], total: Total) -> list[Tokens]:
        return whiten(batches, total)


def whiten(batches: Sequence[Tokens], total: Total) -> list[Tokens]:
    """Returns `advantages` with mean 0 and deviation 1 over the trained tokens of all ranks."""
    import torch

    worth = [batch.columns["advantages"].double()[batch.loss_mask] for batch in batches]
    here = torch.cat(worth) if worth else torch.zeros(0, dtype=torch.float64)
    number, summed = total(torch.stack([torch.full_like(here.sum(), len(here)), here.sum()]))
    mean = summed / number.clamp(min=1)
    squares = total((here - mean).square().sum())
    scale = (squares / (number - 1).clamp(min=1) + _EPS).rsqrt()

    def of(batch: Tokens) -> Tokens:
        raw = batch.columns["advantages"]
        values = ((raw - mean) * scale).where(batch.loss_mask, 0.0)
        return batch.with_columns(advantages=values.to(raw.dtype))

    return [of(batch) for batch in batches]
