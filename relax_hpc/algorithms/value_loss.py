"""The loss of a critic: how far its values are from what came of the states."""

from typing import TYPE_CHECKING

from relax_hpc.algorithms.estimates import generalized
from relax_hpc.algorithms.part import LossFunction, LossOutput, Tokens

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(*, clip: float, gamma: float, lam: float) -> LossFunction:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), R = V_old + A of `lam`.

    V_old are the values that the batch came with, R is without gradient. The clip is that of PPO's
    own code (arXiv:1707.06347 has none; verl and OpenRLHF have it with the half, slime without).
    R with lam = 1 and gamma = 1 is the reward, whatever V_old is: the unbiased target of VAPO
    (arXiv:2504.05118), decoupled from the lam of the policy's advantages.

    Args:
        clip: c; 0 does not clip.
        gamma: and `lam`, see `estimates.generalized`.
    """

    def loss(values: "Tensor", tokens: Tokens) -> LossOutput:
        mask = tokens.loss_mask
        known = tokens.columns["values"]
        to_come = tokens.columns["advantages"]
        advantages = generalized(known, to_come, tokens, gamma=gamma, lam=lam)
        old = known.where(mask, 0)
        returns = old + advantages.float()
        new = values.where(mask, 0)
        squares = (new - returns).square()
        clipped = new.detach().new_zeros(())
        if clip > 0:
            held = (old + (new - old).clamp(-clip, clip) - returns).square()
            clipped = ((held > squares) & mask).sum()
            squares = squares.maximum(held)
        error = new.detach() - returns
        return LossOutput(
            squares.sum() / 2,
            {
                "value/mean": new.detach().sum(),
                "value/clipped": clipped,
                "value/error": error.sum(),
                "value/square_error": error.square().sum(),
                "value/return": returns.sum(),
                "value/square_return": returns.square().sum(),
            },
        )

    return loss
