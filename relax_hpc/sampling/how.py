"""The settings by which responses are sampled."""

from typing import NamedTuple

from relax_hpc.engines.response import End
from relax_hpc.media.spool import View


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
    top_p: float = 1.0
    """Part of the probability that is sampled from; its logprobs stay those of the whole."""
    top_k: int = 0
    """Tokens that are sampled from; 0 is all."""
    end: End | None = None
    """Tells the end of a reply by its tokens."""
    ignore_eos: bool = False
    """Nothing but the limits ends a reply."""
    view: View | None = None
    """Media among the tokens that are given."""
