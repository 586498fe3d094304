"""Runs inside SGLang: samples tokens, and takes their logprobs, in one look at the logits.

SGLang's sampler makes seven passes over [B, V] float32 for temperature, softmax, logarithm and
draw: of a decoding step with 1,000 requests at 0.5B they are 40 %. Here a token is the argmax of
logit / temperature - log E with E from the exponential distribution (Gumbel-max, Maddison et al.,
arXiv:1411.0030), which needs the logits once. What asks for more than temperature (top-p, top-k,
greedy, seeds, several logprobs) is SGLang's own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LANES = 1024
"""Each looks at four columns: a call of the random number generator gives four numbers."""
_MOST_SEED = 2**31 - 1


@triton.jit
def _draw(x, u, column, score, token, value):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Takes further draws, lane by lane, where they are better."""
    # Small values of E, which win, are exact: 1 - u would round them. u = 0 stands for [0, 2**-31).
    e = tl.where(u < 1e-3, u * (1.0 + 0.5 * u), -tl.log(1.0 - u))
    noised = x - tl.log(tl.maximum(e, 2.3e-10))
    better = noised > score
    token, value = tl.where(better, column, token), tl.where(better, x, value)
    return tl.maximum(score, noised), token, value


@triton.jit  # type: ignore[untyped-decorator]
def _look(  # type: ignore[no-untyped-def]
    logits, stride, temperatures, seed, vocab, found,  # noqa: ANN001
    LANES: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Finds [5] of a part of a row: largest value, sum of exponentials relative to it, best draw,
    its column and value."""
    row, part = tl.program_id(0), tl.program_id(1)
    lane, temperature = tl.arange(0, LANES), tl.load(temperatures + row)
    at, low = logits + row.to(tl.int64) * stride, float("-inf")
    u0, u1, u2, u3 = tl.rand4x(tl.load(seed) + row, part * LANES + lane)
    c0 = part * 4 * LANES + lane
    c1, c2, c3 = c0 + LANES, c0 + 2 * LANES, c0 + 3 * LANES
    x0 = tl.load(at + c0, mask=c0 < vocab, other=low).to(tl.float32) / temperature
    x1 = tl.load(at + c1, mask=c1 < vocab, other=low).to(tl.float32) / temperature
    x2 = tl.load(at + c2, mask=c2 < vocab, other=low).to(tl.float32) / temperature
    x3 = tl.load(at + c3, mask=c3 < vocab, other=low).to(tl.float32) / temperature
    peak = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0)
    base = tl.where(peak == low, 0.0, peak)
    total = tl.exp(x0 - base) + tl.exp(x1 - base) + tl.exp(x2 - base) + tl.exp(x3 - base)
    score, token, value = _draw(x0, u0, c0, tl.full([LANES], low, tl.float32), c0, x0)
    score, token, value = _draw(x1, u1, c1, score, token, value)
    score, token, value = _draw(x2, u2, c2, score, token, value)
    score, token, value = _draw(x3, u3, c3, score, token, value)
    best = lane == tl.argmax(score, 0)
    out = found + (row * tl.num_programs(1) + part) * 5
    tl.store(out, peak)
    tl.store(out + 1, tl.sum(total, 0))
    tl.store(out + 2, tl.max(score, 0))
    tl.store(out + 3, tl.sum(tl.where(best, token, 0), 0).to(tl.float32))
    tl.store(out + 4, tl.sum(tl.where(best, value, 0.0), 0))


def draw(logits: Tensor, temperatures: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a token of each row.

    Args:
        logits: [B, V], rows contiguous; V is below 2**24.
        temperatures: [B] or [B, 1], float32.
        seed: one integer, on the GPU; equal seeds give equal draws.

    Returns:
        [B] tokens (int32) and their logprobs at that temperature (float32).
    """
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, 4 * _LANES)
    found = torch.empty(rows, parts, 5, dtype=torch.float32, device=logits.device)
    _look[rows, parts](
        logits, logits.stride(0), temperatures.contiguous(), seed, vocab, found, LANES=_LANES
    )
    peaks, totals, scores, columns, values = found.unbind(-1)
    best = scores.argmax(1, keepdim=True)
    normalizer = (peaks + totals.log()).logsumexp(1)
    logprobs = values.gather(1, best).squeeze(1) - normalizer
    return columns.gather(1, best).squeeze(1).int(), logprobs


def install() -> None:
    """Has SGLang's sampler use `draw` where temperature is all that is asked for."""
    from sglang.srt.layers import sampler as theirs

    whole: Callable[..., Tensor] = theirs.Sampler.forward

    def forward(
        self: Any,  # noqa: ANN401
        logits_output: Any,  # noqa: ANN401
        asked: Any,  # noqa: ANN401
        return_logprob: bool,
        top_logprobs: Sequence[int],
        of_tokens: Sequence[Any],
        *rest: Any,  # noqa: ANN401
        **more: Any,  # noqa: ANN401
    ) -> Tensor:
        is_more = bool(more) or theirs.SGLANG_RETURN_ORIGINAL_LOGPROB or self.enable_deterministic
        if return_logprob:
            is_more = is_more or any(top_logprobs) or any(each is not None for each in of_tokens)
        if is_more or not _is_plain(asked) or not logits_output.next_token_logits.is_cuda:
            given = (logits_output, asked, return_logprob, top_logprobs, of_tokens, *rest)
            return whole(self, *given, **more)
        logits = self._preprocess_logits(logits_output.next_token_logits, asked)
        seed = torch.randint(_MOST_SEED, (1,), device=logits.device)  # the same on all ranks
        tokens, logprobs = draw(logits, asked.temperatures, seed)
        if return_logprob:
            logits_output.next_token_logprobs = logprobs
        self._sync_token_ids_across_tp(tokens, asked)
        return tokens

    theirs.Sampler.forward = forward


def _is_plain(asked: Any) -> bool:  # noqa: ANN401
    """Whether a batch asks for samples at temperatures, and nothing else."""
    further = asked.need_top_p_sampling or asked.need_top_k_sampling or asked.need_min_p_sampling
    masks = any(getattr(asked, "return_sampling_masks", None) or ())  # 0.5.17
    masks = masks or getattr(asked, "sampling_mask_batch_indices", None) is not None  # 0.5.23
    return not (asked.is_all_greedy or further or masks or asked.sampling_seed is not None)
