"""The settings by which responses are sampled."""

from typing import NamedTuple


class How(NamedTuple):
    """The settings of the calls of an episode."""

    temperature: float
    """0 is greedy."""
    max_new_tokens: int
    """Limit of a reply."""
    max_tokens: int
    """Limit of a conversation."""
    min_version: int = 0
    """Oldest policy version that may sample any of their tokens."""
    routed_experts: bool = False
    """Whether to ask which experts every token went to."""
