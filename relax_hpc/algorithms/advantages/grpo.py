"""The reward less the mean of its prompt group, by their deviation."""

from typing import Literal

from relax_hpc.algorithms.part import Advantage, Floats, Needs, Rows

_EPS = 1e-6
"""Keeps a group of nearly equal rewards finite."""


class Grpo(Advantage):
    """A = (R - mean(R)) / (std(R) + 1e-6) over the siblings of a prompt; std divides by G - 1.

    A group of equals, or with a single reward, is worth 0 (verl gives a single one A = R). Source:
    GRPO (arXiv:2402.03300), outcome supervision.
    """

    name: Literal["grpo"] = "grpo"

    def needs(self) -> Needs:
        return Needs(scope="group", min_siblings=2)

    def of_groups(self, rows: Rows) -> Floats:
        import torch

        exact = torch.from_numpy(rows.rewards).double()
        centred = exact - exact.nanmean(dim=1, keepdim=True)
        others = (exact.isfinite().sum(dim=1, keepdim=True) - 1).clamp(min=1)
        deviation = (centred.square().nansum(dim=1, keepdim=True) / others).sqrt()
        return (centred / (deviation + _EPS)).nan_to_num().float().numpy()
