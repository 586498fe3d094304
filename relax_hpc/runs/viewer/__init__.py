"""Shows the trajectories of a run, on a page or in a terminal; here are the options."""

from typing import Literal, NamedTuple

Sort = Literal["newest", "best", "worst", "random", "flipped"]
"""Order of prompt groups; flipped: prompts that went from wrong to right, or back."""
By = Literal["logprob", "advantage", "mask", "version"]
"""Meaning of the colours of tokens."""


class GroupQuery(NamedTuple):
    sort: Sort = "newest"
    groups: int = 16
    """Most prompt groups."""
    step: int | None = None
    """Only this step."""
    guid: int | None = None
    """Only this prompt group."""
