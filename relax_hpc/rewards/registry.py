"""Rewards by the name a job gives them."""

from collections.abc import Callable
from typing import NamedTuple

from relax_hpc.rewards import boxed_number, coin


class Reward(NamedTuple):
    """A verifier, and what it can be asked."""

    score: Callable[[str, str], float]
    """(text of the response, answer) -> reward."""
    can_match: Callable[[str], bool]
    """Whether any response would be right for an answer; what never is, teaches nothing."""
    remedy: str
    """What to do about answers that cannot be matched."""


REWARDS: dict[str, Reward] = {
    "boxed_number": Reward(boxed_number.score, boxed_number.can_match, boxed_number.REMEDY),
    "coin": Reward(coin.score, coin.can_match, ""),
}
