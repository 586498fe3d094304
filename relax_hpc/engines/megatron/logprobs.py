"""Logprobs of given tokens from logits whose vocabulary is split over tensor-parallel ranks.

T = tokens, V = vocabulary, V/tp of it on this rank. Everything is float32 inside, in chunks of T,
so that no float32 copy of the logits ever exists.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities under softmax(logits / temperature).

    Args:
        logits: [T, V/tp] this rank's slice of the vocabulary, carries the gradient.
        targets: [T] int64 token ids in 0..V-1, the same on every rank of `group`.
        group: tensor-parallel ranks, in the order of their slices.

    Returns:
        [T] nats, logprob of the target, with gradient; [T] nats, entropy, without.
    """
    apply = _TokenLogprobs.apply
    logprobs, entropy = apply(logits, targets, temperature, group)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        local = targets - group.rank() * logits.shape[1]
        here = (local >= 0) & (local < logits.shape[1])
        local = local.where(here, 0)
        tops, sums, moments, chosen = (logits.new_empty(len(logits), dtype=torch.float32)
                                       for _ in range(4))  # fmt: skip
        for part, x in _chunks(logits, temperature):
            tops[part] = x.amax(-1)
            chosen[part] = x.gather(1, local[part, None])[:, 0]
            weights = (x - tops[part, None]).exp_()
            sums[part] = weights.sum(-1)
            moments[part] = weights.mul_(x).sum(-1)
        chosen = chosen.where(here, 0)
        if group.size() > 1:
            top = tops.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            rescale = (tops - top).exp()
            stacked = torch.stack([sums * rescale, moments * rescale, chosen])
            dist.all_reduce(stacked, group=group)
            tops, (sums, moments, chosen) = top, stacked.unbind()
        normalizer = tops + sums.log()
        entropy = normalizer - moments / sums
        ctx.save_for_backward(logits, local, here, normalizer)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return chosen - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        # d logprob / d logits = (onehot(target) - softmax) / temperature
        logits, local, here, normalizer = ctx.saved_tensors
        scaled = grad / ctx.temperature
        out = torch.empty_like(logits)
        for part, x in _chunks(logits, ctx.temperature):
            softmax = (x - normalizer[part, None]).exp_()
            row_grad = softmax.mul_(-scaled[part, None])
            row_grad.scatter_add_(1, local[part, None], (scaled * here)[part, None])
            out[part] = row_grad
        return out, None, None, None


def _chunks(logits: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    size = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, len(logits), size):
        part = slice(start, start + size)
        x = logits[part].float()
        yield part, x if temperature == 1 else x / temperature
