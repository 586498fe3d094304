"""Responses of an engine: how they are wanted, what is there of one, and what they cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.media.spool import View
from relax_hpc.schema import FinishReason

Experts = npt.NDArray[np.int16]
End = Callable[[Sequence[int], int], int | None]
"""Tells of tokens, the first so many of which it has seen, how many of them a response is; None
while it is not over. Engines are given token ids and no text, so none of them can."""


class Sampling(NamedTuple):
    """The settings of a sample."""

    temperature: float
    """0 is greedy."""
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    """End a response, as the model's own end-of-sequence tokens do."""
    ignore_eos: bool = False
    """Nothing but `max_new_tokens` ends a response."""
    routed_experts: bool = False
    """Ask which experts every token went to; the engine must have been told to record them."""
    top_p: float = 1.0
    """Sample from the fewest tokens that have this much of the probability together."""
    top_k: int = 0
    """Sample from so many tokens, the most likely ones; 0 is all. With `top_p`, those of both."""
    end: End | None = None
    """Ends a response, too."""
    view: View | None = None
    """Media among the tokens of the prompt."""


class Generation(NamedTuple):
    """One sampled response."""

    token_ids: list[int]
    """Tokens as the engine sampled them, with the stop token; never re-tokenised from text."""
    logprobs: list[float]
    """Nats, at sampling time, of the temperature-scaled distribution of all tokens."""
    version_runs: list[tuple[int, int]]
    """(first response token, policy version) per run, ascending; empty without tokens."""
    finish: FinishReason
    routed_experts: Experts | None = None
    """[prompt and response tokens, layers x experts per token], if asked for. The last token has
    not been through the model: its row repeats the one before."""


class Counts(NamedTuple):
    """The tokens and media that an engine was asked for and gave, so far; they add up."""

    num_tokens: int = 0
    """Sampled."""
    num_given: int = 0
    """Tokens of prompts whose reply is complete; a response that goes on is part of its prompt."""
    num_cached: int = 0
    """Tokens of these that it did not have to compute."""
    num_media: int = 0
    """Media among them."""
    num_media_cached: int = 0
    """Media of which it had to compute no token, so it did not have to encode them."""

    def plus(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: "Counts") -> "Counts":
        return Counts(*(a - b for a, b in zip(self, other, strict=True)))


class Load(NamedTuple):
    """The load of an engine, over all its data-parallel ranks."""

    running: int
    waiting: int
    kv_used: float
    """Fraction of the key-value cache, of the fullest rank."""


@dataclass(slots=True)
class Draft:
    """A response that is not complete; it outlives the engine that sampled it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_runs: list[tuple[int, int]] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)
    """Rows from the first prompt token on, in pieces."""
    num_unsent: int = 0
    """Tokens, at most, that an engine sampled and did not send before the request was cut off."""

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.token_ids += tokens
        self.logprobs += logprobs

    def mark(self, first: int, version: int) -> None:
        """Tokens from `first` on were sampled by `version`."""
        if not self.version_runs or self.version_runs[-1][1] != version:
            self.version_runs.append((first, version))

    def remark(self, first: int, version: int) -> None:
        """Does as `mark`, whatever was said of those tokens before."""
        self.version_runs = [run for run in self.version_runs if run[0] < first]
        self.mark(first, version)

    def cut(self, num_tokens: int) -> None:
        """Forgets what comes after the first so many tokens, and the experts, of which the engine
        tells those of a whole reply."""
        self.experts = []
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:]

    def finished(self, reason: FinishReason) -> Generation:
        experts = np.concatenate(self.experts) if self.experts else None
        if experts is not None:
            experts = np.concatenate([experts, experts[-1:]])
        runs = [run for run in self.version_runs if run[0] < len(self.token_ids)]
        return Generation(self.token_ids, self.logprobs, runs, reason, experts)
