"""Corrections for tokens that another policy, or another program, sampled."""

import torch
from torch import Tensor

from relax_hpc.algorithms.algorithm import Correction


def truncated(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, cap: float
) -> Correction:
    """Truncated importance weights min(pi_old / mu, cap) per token.

    They correct both for staleness (mu is an older policy) and for the gap between the engine's
    and the trainer's arithmetic; the cap bounds their variance at the price of a bias.

    Args:
        old_logprobs: [T] nats, the trainer's policy before the update, no gradient.
        rollout_logprobs: [T] nats, recorded when the token was sampled.
        mask: [T] bool, True on trained tokens.
        cap: largest weight, > 0.

    Returns:
        Weights, 1 where the mask is False; their mean, and how many reach the cap.

    Source: truncated importance sampling, Ionides (2008); its use between rollout engine and
    trainer follows AReaL's behaviour/proximal split (arXiv:2505.24298).
    """
    # Masked positions may hold garbage; exp(garbage) can be inf, so mask before exp.
    log_ratio = torch.where(mask, old_logprobs - rollout_logprobs, 0.0)
    weights = log_ratio.exp().clamp(max=cap).detach()
    metrics = {
        "loss/importance_mean": (weights * mask).sum(),
        "loss/importance_capped": ((weights >= cap) & mask).sum(),
    }
    return Correction(weights, metrics)
