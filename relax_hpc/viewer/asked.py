"""The wish of whoever looks at trajectories."""

from typing import Literal, NamedTuple

Sort = Literal["newest", "best", "worst", "random"]
"""Which prompt groups come first."""
By = Literal["logprob", "mask", "version"]
"""What colours tokens."""


class Asked(NamedTuple):
    sort: Sort = "newest"
    groups: int = 16
    """Prompt groups at most."""
    step: int | None = None
    """Only of this step."""
    guid: int | None = None
    """Only this prompt group."""
