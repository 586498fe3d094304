"""Policy losses. Pure functions of tensors: no config, no engine, no I/O.

T = packed tokens of one micro-batch on one data-parallel rank.
"""

import torch
from torch import Tensor

from relax_hpc.algorithms.algorithm import LossOutput
from relax_hpc.algorithms.kl import kl_to_reference


def with_kl(
    output: LossOutput,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    coefficient: float,
) -> LossOutput:
    """Adds `coefficient` times the KL divergence from the reference, and says how large that is.

    Args:
        output: of the policy loss.
        logprobs: [T] nats, current policy, carries the gradient.
        ref_logprobs: [T] nats, no gradient.
        mask: [T] bool, True on trained tokens.
        coefficient: beta of GRPO; 0 only measures.
    """
    kl = kl_to_reference(logprobs, ref_logprobs, mask).sum()
    loss = output.loss + coefficient * kl if coefficient else output.loss
    return output._replace(loss=loss, metrics=output.metrics | {"kl/mean": kl.detach()})


def grpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    weights: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    """Token-level clipped surrogate with clip-higher.

        loss = -sum_t m_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
        r_t  = exp(logprobs_t - old_logprobs_t)

    Args:
        logprobs: [T] nats, current policy, carries the gradient.
        old_logprobs: [T] nats, policy before this step's updates, no gradient.
        weights: [T] w of the correction, no gradient.
        advantages: [T].
        mask: [T] bool, True on trained tokens.
        clip_low: in (0, 1).
        clip_high: > 0.

    Source: GRPO (arXiv:2402.03300); token-level normalisation and clip-higher from DAPO
    (arXiv:2503.14476), whose mean runs over a prompt group and ours over the whole batch.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    advantages = torch.where(mask, advantages, 0.0)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -(weights * surrogate * mask).sum()
    with torch.no_grad():
        metrics = {
            "loss/clip_fraction": ((clipped != ratio) & mask).sum(),
            "loss/approx_kl": ((ratio - 1 - log_ratio) * mask).sum(),
        }
    return LossOutput(loss, metrics)


def cross_entropy(logprobs: Tensor, mask: Tensor) -> LossOutput:
    """Negative log-likelihood of the trained tokens, nats.

    Args:
        logprobs: [T] nats, carries the gradient.
        mask: [T] bool, True on trained tokens.
    """
    return LossOutput(-torch.where(mask, logprobs, 0.0).sum(), {})
