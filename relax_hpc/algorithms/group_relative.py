"""Rewards to advantages. Pure functions of tensors: no config, no engine, no I/O."""

from torch import Tensor


def group_relative(rewards: Tensor, *, normalize_std: bool, eps: float = 1e-6) -> Tensor:
    """Centres rewards within each prompt group; optionally scales them to unit deviation.

    Args:
        rewards: [P, G] float; P prompts, G siblings each; NaN where a sibling has none.
        normalize_std: True is GRPO; False is Dr. GRPO, which does not favour easy and hard
            prompts over those in between.
        eps: keeps a group of nearly equal rewards finite.

    Returns:
        [P, G] advantages; a row of equal rewards gives zeros, and so does NaN, which is
        compared with nobody.

    Source: GRPO (arXiv:2402.03300), outcome supervision; Dr. GRPO (arXiv:2503.20783).
    """
    exact = rewards.double()  # the mean of equal ones is what they are
    centred = exact - exact.nanmean(dim=1, keepdim=True)
    if normalize_std:
        deviation = centred.square().nanmean(dim=1, keepdim=True).sqrt()
        centred = centred / (deviation + eps)
    return centred.nan_to_num().to(rewards.dtype)
