"""Rewards by the name a job gives them: (response text, answer) -> reward."""

from collections.abc import Callable

from relax_hpc.rewards import boxed_number, coin

Reward = Callable[[str, str], float]

REWARDS: dict[str, Reward] = {
    "boxed_number": boxed_number.score,
    "coin": coin.score,
}
