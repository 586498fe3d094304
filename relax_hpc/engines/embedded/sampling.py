"""Sampling whose randomness belongs to the request: a function of its seed and the position.

No generator is shared and none has state, so what else runs in the batch, a pause, or a restart
with the tokens so far as prompt cannot change what a seed draws.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position). Both are [B].

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), once over the seed and once more
    over the stream it gives, so that neighbouring seeds do not share shifted streams.
    """
    with np.errstate(over="ignore"):
        stream = _mix(seeds.astype(np.uint64) + _GOLDEN)
        bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


class Limits(NamedTuple):
    """The tokens that are sampled from, row by row."""

    top_ps: Tensor
    """[B] float64; 1 is all."""
    top_ks: Tensor
    """[B] int64, above 0."""


def sample(
    logits: Tensor, temperatures: Tensor, draws: Tensor, limits: Limits | None = None
) -> tuple[Tensor, Tensor]:
    """Draws one token per row by inverting its cumulative distribution.

    Args:
        logits: [B, vocab].
        temperatures: [B] float32; 0 takes the most likely token.
        draws: [B] float64 in [0, 1).
        limits: leave tokens out; None leaves out none.

    Returns:
        [B] tokens, and [B] float32 their log-probabilities in nats, of all tokens and the
        temperature: logits over it (as they are where it is 0). As SGLang's, they do not know of
        `limits`.
    """
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures)[:, None]
    logprobs = (logits.float() / scale).log_softmax(-1)
    # float64: a float32 sum over a large vocabulary would cut off the tail.
    probabilities = logprobs.exp()
    if limits is not None:
        probabilities = probabilities * kept(logprobs, limits)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    below = torch.nextafter(total, torch.zeros_like(total))  # a product can be rounded up to it
    targets = torch.minimum(draws * total, below)[:, None]
    drawn = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    tokens = torch.where(greedy, logprobs.argmax(-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def kept(logprobs: Tensor, limits: Limits) -> Tensor:
    """Which tokens are sampled from, [B, vocab]: those that both limits leave, as with SGLang.

    A token is among the top p if those that are likelier have less than p together, of all tokens
    rather than of the top k. Of equally likely ones those with lower ids come first.
    """
    ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.exp().double()
    likelier = probabilities.cumsum(-1) - probabilities
    ranks = torch.arange(logprobs.shape[-1], device=logprobs.device)
    top_ps = limits.top_ps[:, None]
    inside = (ranks < limits.top_ks[:, None]) & ((likelier < top_ps) | (top_ps == 1))
    return torch.zeros_like(inside).scatter(-1, ids, inside)
