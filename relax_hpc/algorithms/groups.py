"""Chooses which prompt groups and responses are trained on."""

from typing import Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from relax_hpc.algorithms.part import AlgorithmPart, Floats
from relax_hpc.sections import Positive

Mask = npt.NDArray[np.bool_]
MOST_BATCHES = 10
"""Most skipped groups, in batches per policy version of lag, before the run ends and names their
prompts."""


class Groups(AlgorithmPart):
    """A rule for groups, and one for truncated responses. P groups of G episodes."""

    truncated: Literal["mask", "penalty", "keep"] = "keep"
    """Episodes with a response cut off by the run's own limit, rollout.max_new_tokens or the
    context. mask: they are compared with their siblings, but not trained on. penalty: long
    responses have a lower reward. keep: as any other."""
    overlong_buffer: Positive | None = None
    """Last tokens of rollout.max_new_tokens, over which the penalty grows from 0 to 1; unset is a
    fifth of them."""

    def buffer(self, longest: int) -> int:
        """Tokens over which the penalty grows, with responses of at most `longest`."""
        return self.overlong_buffer or max(longest // 5, 1)

    def compare(self, rewards: Floats, lengths: npt.NDArray[np.int64], longest: int) -> Floats:
        """Returns the [P, G] rewards by which siblings are compared.

        The penalty of a response of l tokens, with limit L, is 0 up to L - B, then falls linearly
        to -1 at L (DAPO, arXiv:2503.14476, eq. 13, soft overlong punishment; B a fifth of L there).

        Args:
            rewards: [P, G], NaN for none.
            lengths: [P, G] tokens of responses.
            longest: L.
        """
        if self.truncated != "penalty":
            return rewards
        buffer = self.buffer(longest)
        return rewards + np.clip((longest - buffer - lengths) / buffer, -1, 0).astype(np.float32)

    def select_trained(self, was_cut: Mask) -> Mask:
        """Returns [P, G] which episodes are trained on, by their length.

        An excluded one stays in its group's mean: its reward measures the policy. So does TRL with
        `mask_truncated_completions`, which compares rewards first.

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
    """Trains on a batch as sampled; groups without spread teach nothing and are left out."""

    name: Literal["as_sampled"] = "as_sampled"


class Refill(Groups):
    """Fills a batch with groups that have spread, sampling further ones for those without.

    Dynamic sampling of DAPO (arXiv:2503.14476, eq. 11), which samples whole further batches and
    discards the surplus; here exactly as many groups are added as were skipped. Rewards decide, as
    there, before a length penalty.
    """

    name: Literal["refill"] = "refill"
