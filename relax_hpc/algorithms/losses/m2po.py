"""PPO with a clip as wide as the second moment of the batch's ratios allows."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_hpc.algorithms.part import ANCHORS, Loss, Needs, TokenLoss, Tokens, Total
from relax_hpc.algorithms.ratios import LARGEST, advantages_of, log_ratio
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor


class M2po(Loss):
    """loss_t = -min(r A, clip(r, exp(-tau), exp(tau)) A), r = pi / anchor.

    tau is the largest for which the mean of min(abs(log r), tau)^2, over the tokens with A > 0 and
    r > 1 or A < 0 and r < 1, is within the budget. Source: M2PO (arXiv:2510.01161). The authors
    solve it in each micro-batch, and take the next token below; ours once for the batch, of the
    policy before the step. AReaL drops tokens instead, of any sign.
    """

    name: Literal["m2po"] = "m2po"
    anchor: Literal["rollout"] = "rollout"
    """Policy in the denominator of the ratio, the sampler: to the other one it is 1 at first."""
    budget: Annotated[Number, Field(gt=0)] = 0.04
    """Mean of the squared log ratio that is let through."""

    def needs(self) -> Needs:
        return Needs(scope="batch", prepass=True, anchors=ANCHORS)

    def prepare(self, batches: Sequence[Tokens], total: Total) -> list[Tokens]:
        tau = largest([_harmful(batch) for batch in batches], self.budget, total)
        return [
            batch.with_columns(m2po_tau=tau.to(like := batch.columns["advantages"]).expand_as(like))
            for batch in batches
        ]

    def of_tokens(self, logprobs: "Tensor", tokens: Tokens) -> TokenLoss:
        ratio, advantages = log_ratio(logprobs, tokens).exp(), advantages_of(tokens)
        tau = tokens.columns["m2po_tau"]
        clipped = ratio.clamp((-tau).exp(), tau.exp()) * advantages
        is_clipped = clipped.detach() < (ratio * advantages).detach()
        metrics = {"loss/clip_fraction": is_clipped, "loss/m2po_tau": tau}
        return TokenLoss(-(ratio * advantages).minimum(clipped), metrics)


def _harmful(batch: Tokens) -> "Tensor":
    """[T] squared log ratios; infinite where a token has not moved as its advantage wants."""
    logs = log_ratio(batch.columns["old_logprobs"], batch, "rollout_logprobs").double()
    return logs.square().masked_fill_(logs * advantages_of(batch) <= 0, math.inf)


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
