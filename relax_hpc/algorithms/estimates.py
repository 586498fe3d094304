"""Generalized advantage estimation on packed tokens (arXiv:1506.02438). T tokens, S sequences."""

from typing import TYPE_CHECKING

from relax_hpc.algorithms.part import Tokens

if TYPE_CHECKING:
    from torch import Tensor


def estimate_gae(
    values: "Tensor", rewards: "Tensor", tokens: Tokens, *, gamma: float, lam: float,
    alpha: float = 0.0,
) -> "Tensor":  # fmt: skip
    """A_t = delta_t + gamma lam A_t', delta_t = r_t + gamma V_t' - V_t; 0 where nothing is trained.

    t' is the next trained token of the same sequence. Given tokens between them, e.g. from a tool,
    are part of the state transition. verl does so, too; slime counts a given token as a step. V is
    0 after the last one.

    Args:
        values: [T] V of the state in which a token was chosen.
        rewards: [T] undiscounted rewards to come from a token on, so r_t is the drop to the next
            one. The same value on all tokens is a reward at the end.
        tokens: with loss mask and sequences.
        gamma: discount of a step.
        lam: 1 uses rewards alone, 0 the next states' values.
        alpha: above 0, lam is max(0, 1 - 1 / (alpha l)) instead, in a sequence of l trained tokens,
            so that 1 / (1 - lam) = alpha l (VAPO, arXiv:2504.05118, with 0.05).

    Returns:
        [T] float64.
    """
    import torch

    place = tokens.loss_mask.nonzero().squeeze(1)
    ids, v, to_come = tokens.sequence_ids[place], values[place].double(), rewards[place].double()
    goes_on = torch.zeros_like(ids, dtype=torch.bool)
    goes_on[:-1] = ids[1:] == ids[:-1]
    later = goes_on.double()
    reward = to_come - later * to_come.roll(-1)
    delta = reward + gamma * later * v.roll(-1) - v
    if alpha > 0:
        length = torch.zeros(len(tokens.groups), dtype=torch.float64, device=ids.device)
        length.index_add_(0, ids, torch.ones_like(v))
        decay = (1 - 1 / (alpha * length)).clamp(min=0)[ids]
    else:
        decay = torch.full_like(v, lam)
    found = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    found[place] = _sum_up(delta, gamma * decay * later)
    return found


def _sum_up(delta: "Tensor", decay: "Tensor") -> "Tensor":
    """A_t = delta_t + decay_t A_(t+1), in log2(length) passes.

    A pass is two GPU calls, between two pairs of buffers padded with zeros for the longest stride.
    """
    import torch

    length, stride = len(delta), 1
    behind = 1 << length.bit_length()
    sums, factors = (torch.nn.functional.pad(each, (0, behind)) for each in (delta, decay))
    spare = torch.zeros_like(sums), torch.zeros_like(factors)
    while stride < length:
        ahead = slice(stride, length + stride)
        torch.addcmul(sums[:length], factors[:length], sums[ahead], out=spare[0][:length])
        torch.mul(factors[:length], factors[ahead], out=spare[1][:length])
        (sums, factors), spare = spare, (sums, factors)
        stride *= 2
    return sums[:length]
