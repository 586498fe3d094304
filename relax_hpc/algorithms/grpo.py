"""GRPO: a response is worth what sets it apart from its siblings (arXiv:2402.03300)."""

from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from relax_hpc.algorithms.algorithm import (
    Algorithm,
    Correction,
    Floats,
    Loss,
    LossOutput,
    Needs,
    Rows,
    Settings,
    Tokens,
)
from relax_hpc.sections import Number

if TYPE_CHECKING:
    from torch import Tensor


class GrpoSettings(Settings):
    name: Literal["grpo"] = "grpo"
    """The algorithm: how rewards become a loss; see docs/algorithms.md."""
    normalize_std: bool = False
    """Divide advantages by the group's standard deviation (GRPO); off is Dr. GRPO."""
    clip_low: Annotated[Number, Field(gt=0, lt=1)] = 0.2
    """Lower clip: ratio >= 1 - clip_low."""
    clip_high: Annotated[Number, Field(gt=0)] = 0.28
    """Upper clip: ratio <= 1 + clip_high (clip-higher)."""
    importance_cap: Annotated[Number, Field(gt=0)] = 2.0
    """Truncated importance sampling: weight min(pi_old / mu, cap) per token."""
    kl_coefficient: Annotated[Number, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the reference in the loss; above 0 needs a reference."""


def _advantages(settings: GrpoSettings, rows: Rows) -> Floats:
    import torch

    from relax_hpc.algorithms.group_relative import group_relative

    rewards = torch.from_numpy(rows.rewards)
    return group_relative(rewards, normalize_std=settings.normalize_std).numpy()


def _teaches(settings: GrpoSettings, advantages: Floats) -> npt.NDArray[np.bool_]:
    """A row without advantage (its whole group scored the same) has no gradient, unless a KL term
    pulls it: it is left out, as in DAPO (arXiv:2503.14476), dynamic sampling.
    """
    if settings.kl_coefficient > 0:
        return np.ones(advantages.shape, bool)
    return np.not_equal(advantages, 0)


def _correction(settings: GrpoSettings, tokens: Tokens) -> Correction:
    from relax_hpc.algorithms.importance import truncated

    return truncated(
        tokens.columns["old_logprobs"],
        tokens.columns["rollout_logprobs"],
        tokens.loss_mask,
        cap=settings.importance_cap,
    )


def _loss(settings: GrpoSettings, _: frozenset[str]) -> Loss:
    from relax_hpc.algorithms.clipped import grpo

    def loss(logprobs: "Tensor", tokens: Tokens) -> LossOutput:
        return grpo(
            logprobs,
            tokens.columns["old_logprobs"],
            tokens.columns["correction"],
            tokens.columns["advantages"],
            tokens.loss_mask,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
        )

    return loss


def _needs(settings: GrpoSettings) -> Needs:
    key = f"algorithm.kl_coefficient = {settings.kl_coefficient}"
    wanted = {"ragged/ref_logprobs": key} if settings.kl_coefficient else {}
    return Needs(wanted, min_siblings=2)


GRPO = Algorithm(
    "grpo",
    GrpoSettings,
    _loss,
    _advantages,
    _teaches,
    correction=_correction,
    kl=lambda settings: float(settings.kl_coefficient),
    needs=_needs,
)
