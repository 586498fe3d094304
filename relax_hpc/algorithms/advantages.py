"""Rewards to advantages. Pure functions of tensors: no config, no engine, no I/O."""

from torch import Tensor


def group_relative(rewards: Tensor, *, normalize_std: bool, eps: float = 1e-6) -> Tensor:
    """Centres rewards within each prompt group; optionally scales them to unit deviation.

    Args:
        rewards: [P, G] float; P prompts, G siblings each.
        normalize_std: True is GRPO; False is Dr. GRPO, which does not favour easy and hard
            prompts over those in between.
        eps: keeps a group of nearly equal rewards finite.

    Returns:
        [P, G] advantages; a row of equal rewards gives zeros.

    Source: GRPO (arXiv:2402.03300), outcome supervision; Dr. GRPO (arXiv:2503.20783).
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if not normalize_std:
        return centred
    return centred / (rewards.std(dim=1, keepdim=True, correction=0) + eps)
