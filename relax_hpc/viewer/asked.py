"""The wish of whoever looks at trajectories."""

from typing import Literal, NamedTuple

Sort = Literal["newest", "best", "worst", "random", "flipped"]
"""Which prompt groups come first; flipped: prompts that went from wrong to right, or back."""
By = Literal["logprob", "advantage", "mask", "version"]
"""Meaning of the colours of tokens."""


class Asked(NamedTuple):
    sort: Sort = "newest"
    groups: int = 16
    """Prompt groups at most."""
    step: int | None = None
    """Only of this step."""
    guid: int | None = None
    """Only this prompt group."""
