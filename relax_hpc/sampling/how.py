"""The settings by which responses are sampled."""

from typing import NamedTuple


class How(NamedTuple):
    """How the calls of an episode are sampled."""

    temperature: float
    """0 is greedy."""
    max_new_tokens: int
    """Of a reply."""
    max_tokens: int
    """Of a conversation."""
    min_version: int = 0
    """No older policy samples any of their tokens."""
    routed_experts: bool = False
    """Ask which experts every token went to."""
