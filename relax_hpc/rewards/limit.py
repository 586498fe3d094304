"""The end of a run whose reward fails too often."""

from collections import Counter, deque
from collections.abc import Mapping

from relax_hpc.errors import RewardError
from relax_hpc.rewards.contract import Score

WINDOW, LEAST = 500, 200
"""Newest samples that are looked at, and samples to be scored before that."""
_SHOWN = 5
"""Reasons that are named, the most frequent first."""


class ErrorLimit:
    """Remembers how the newest samples were scored.

    Args:
        most: part of `WINDOW` that may have failed.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._newest = deque[tuple[str, str | None]](maxlen=WINDOW)

    def add(self, scores: Mapping[str, Score]) -> None:
        """Notes scores by the names of their samples.

        Raises:
            RewardError: too many have failed; nothing of these is to be trained on.
        """
        self._newest.extend((name, score.error) for name, score in scores.items())
        failed = [(name, error) for name, error in self._newest if error is not None]
        if len(self._newest) < LEAST or len(failed) <= self._most * WINDOW:
            return
        first = {error: name for name, error in reversed(failed)}
        reasons = Counter(error for _, error in failed).most_common(_SHOWN)
        named = "; ".join(f"{count} x {error}, first in {first[error]}" for error, count in reasons)
        raise RewardError(
            f"reward.most_errors = {self._most:g}: the reward failed for {len(failed)} of the last "
            f"{len(self._newest)} samples, among them, by guid/sibling, {named}; correct the "
            "reward, or allow more, and submit a run of another name: resume keeps both"
        )
