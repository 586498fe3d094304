"""The prompt groups, and the responses of them, that are trained on."""

from typing import Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from relax_hpc.algorithms.part import Floats, Part
from relax_hpc.sections import Positive

Mask = npt.NDArray[np.bool_]
MOST_BATCHES = 10
"""Batches' worth of groups that may be skipped for one batch, for each policy version that sampling
may be ahead, before the run ends and names their prompts."""


class Groups(Part):
    """A rule for groups, and one for responses that were cut off. P groups of G episodes."""

    truncated: Literal["mask", "penalty", "keep"] = "keep"
    """Episodes of which a limit of the run, not the environment's own, cut a response off:
    rollout.max_new_tokens, or the end of the context. mask: they are compared with their siblings,
    but not trained on. penalty: long ones have a lower reward. keep: as any other."""
    overlong_buffer: Positive | None = None
    """Tokens at the end of rollout.max_new_tokens in which the penalty grows from 0 to 1; unset is
    a fifth of them."""

    def buffer(self, longest: int) -> int:
        """Tokens in which the penalty grows, of responses of at most `longest`."""
        return self.overlong_buffer or max(longest // 5, 1)

    def compared(self, rewards: Floats, lengths: npt.NDArray[np.int64], longest: int) -> Floats:
        """[P, G] rewards as siblings are compared by them.

        With a penalty a response of l tokens, of at most L, has 0 added up to L - B, and from there
        on linearly less, -1 at L (DAPO, arXiv:2503.14476, eq. 13, soft overlong punishment; B a
        fifth of L there).

        Args:
            rewards: [P, G], NaN where there is none.
            lengths: [P, G] tokens of responses.
            longest: L.
        """
        if self.truncated != "penalty":
            return rewards
        buffer = self.buffer(longest)
        return rewards + np.clip((longest - buffer - lengths) / buffer, -1, 0).astype(np.float32)

    def trained(self, was_cut: Mask) -> Mask:
        """[P, G] the episodes that are trained on, as far as it is for their length.

        One that is not stays in the mean of its group: what it got says how good the policy is.
        So does TRL with `mask_truncated_completions`: its trainer compares rewards before that.

        Args:
            was_cut: [P, G] whether a response reached its limit.
        """
        return ~was_cut if self.truncated == "mask" else np.ones_like(was_cut)

    @model_validator(mode="after")
    def _buffer_is_used(self) -> Self:
        if self.overlong_buffer is not None and self.truncated != "penalty":
            raise ValueError("overlong_buffer is of truncated = 'penalty'; set that, or remove it")
        return self


class AsSampled(Groups):
    """A batch is what was sampled; groups without spread teach nothing and are left out."""

    name: Literal["as_sampled"] = "as_sampled"


class Refill(Groups):
    """A batch is groups with spread; others are skipped, and further ones take their place.

    Dynamic sampling of DAPO (arXiv:2503.14476, eq. 11), which fills a batch from whole further
    batches and throws the surplus away; here exactly as many further groups are sampled as were
    skipped. Rewards decide, as there, before a penalty for length is added to them.
    """

    name: Literal["refill"] = "refill"
