"""Distances of the policy from a reference. Pure functions of tensors."""

import torch
from torch import Tensor

_LARGEST = 20.0
"""Largest log pi_ref - log pi: e**20 is far beyond what a gradient survives, and still finite."""


def kl_to_reference(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[T] estimate of KL(pi || pi_ref) per token: never negative, unbiased for tokens from pi.

        kl_t = exp(d_t) - d_t - 1,    d_t = ref_logprobs_t - logprobs_t

    Args:
        logprobs: [T] nats, current policy, carries the gradient.
        ref_logprobs: [T] nats, no gradient.
        mask: [T] bool; elsewhere the estimate is 0, and garbage is inert.

    Source: GRPO (arXiv:2402.03300) eq. 4; Schulman, "Approximating KL divergence" (2020), k3.
    """
    # Masked positions may hold garbage; garbage * 0 is nan, so mask before.
    gap = torch.where(mask, ref_logprobs - logprobs, 0.0).clamp(max=_LARGEST)
    return gap.exp() - gap - 1
