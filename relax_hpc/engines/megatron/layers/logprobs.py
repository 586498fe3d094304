"""Logprobs of given tokens, from hidden states or from logits, the vocabulary split over ranks.

T = tokens, V = vocabulary, V/tp of it on this rank, h = hidden size. The output layer is part of
it: logits exist for a chunk of the tokens at a time, and are made again for the gradient, so that
nothing of the size [T, V] is ever there. Statistics are float32.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.engines.megatron.layers.fused import compiled_on_gpu
from relax_hpc.engines.megatron.layers.gradient_fusion import add_product

_CHUNK_BYTES = 5 << 28
"""Limit of a chunk's logits; their gradient takes as much once more."""
_TILE = 128
"""Tokens of a chunk are a multiple, if there are several: products are computed in such tiles."""
_GIB = 1 << 30


def hidden_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup,
    float32_logits: bool = False,
    kept_gib: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities under softmax(hidden @ weight.T / temperature).

    The weight's gradient is added to its `main_grad`, where Megatron has given it one.

    Args:
        hidden: [T, h], the same on every rank of `group`; its gradient is this rank's share of
            their sum.
        weight: [V/tp, h].
        targets: [T] int64 token ids in 0..V-1, the same on every rank of `group`.
        group: tensor-parallel ranks, in the order of their slices.
        float32_logits: do not round logits to the type of the weights.
        kept_gib: logits of this size are kept for the gradient, not made again.

    Returns:
        [T] nats, logprob of the target, with gradient; [T] nats, entropy, without.
    """
    head = Head(temperature, group, float32_logits, kept_gib if torch.is_grad_enabled() else 0.0)
    return _hidden_logprobs(hidden, weight, targets, head)


def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Does as `hidden_logprobs` with logits that are there: [T, V/tp], with gradient."""
    return _token_logprobs(logits, targets, Head(temperature, group))


class Head(NamedTuple):
    """The settings that turn hidden states into logprobs."""

    temperature: float
    group: dist.ProcessGroup
    float32_logits: bool = False
    kept_gib: float = 0.0

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[t, V/tp]."""
        if not self.float32_logits or hidden.dtype == torch.float32:
            return hidden @ weight.t()
        if hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.float().t()


class _HiddenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: Head,
    ) -> tuple[Tensor, Tensor]:
        local, here = _local(targets, weight.shape[0], head.group)
        stats = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        kept, room = [], head.kept_gib * _GIB
        for part in _chunks(len(hidden), weight.shape[0], head):
            logits = head.logits(hidden[part], weight)
            stats[:, part] = _statistics(logits, local[part], head.temperature)
            room -= logits.nbytes
            if room >= 0:
                kept.append(logits)
        logprobs, entropy, normalizer = _combined(stats, here, head.group)
        ctx.save_for_backward(hidden, weight, local, here, normalizer)
        ctx.head, ctx.kept = head, kept
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
        _: Tensor,
    ) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, local, here, normalizer = ctx.saved_tensors
        head = ctx.head
        main_grad = getattr(weight, "main_grad", None)
        weight_grad = main_grad
        if weight_grad is None:
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        hidden_grad = torch.empty_like(hidden)
        kept = ctx.kept
        for part in _chunks(len(hidden), weight.shape[0], head):
            logits = kept.pop(0) if kept else head.logits(hidden[part], weight)
            logits_grad = _logits_gradient(
                logits, local[part], here[part], normalizer[part], grad[part],
                head.temperature, hidden.dtype,
            )  # fmt: skip
            del logits
            torch.mm(logits_grad, weight, out=hidden_grad[part])
            add_product(weight_grad, logits_grad.t(), hidden[part])
        if main_grad is None:
            return hidden_grad, weight_grad.to(weight.dtype), None, None
        weight.grad_added_to_main_grad = True  # Megatron's hook then adds nothing
        return hidden_grad, weight.new_zeros(1).expand_as(weight), None, None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: Tensor,
        targets: Tensor,
        head: Head,
    ) -> tuple[Tensor, Tensor]:
        local, here = _local(targets, logits.shape[1], head.group)
        stats = logits.new_empty(4, len(logits), dtype=torch.float32)
        for part in _chunks(len(logits), logits.shape[1], head):
            stats[:, part] = _statistics(logits[part], local[part], head.temperature)
        logprobs, entropy, normalizer = _combined(stats, here, head.group)
        ctx.save_for_backward(logits, local, here, normalizer)
        ctx.head = head
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        logits, local, here, normalizer = ctx.saved_tensors
        out = torch.empty_like(logits)
        for part in _chunks(len(logits), logits.shape[1], ctx.head):
            out[part] = _logits_gradient(
                logits[part], local[part], here[part], normalizer[part], grad[part],
                ctx.head.temperature, logits.dtype,
            )  # fmt: skip
        return out, None, None


_hidden_logprobs: Callable[..., tuple[Tensor, Tensor]] = _HiddenLogprobs.apply
_token_logprobs: Callable[..., tuple[Tensor, Tensor]] = _TokenLogprobs.apply


def _chunks(num_tokens: int, vocabulary: int, head: Head) -> Iterator[slice]:
    """Equal ones, as far as possible: then the compiled parts see one shape."""
    most = max(1, _CHUNK_BYTES // (vocabulary * (4 if head.float32_logits else 2)))
    count = -(-num_tokens // most)
    size = max(1, -(-num_tokens // max(count, 1)))
    if most >= _TILE < size < num_tokens:
        size = min(-(-size // _TILE), most // _TILE) * _TILE
    for start in range(0, num_tokens, size):
        yield slice(start, start + size)


def _local(targets: Tensor, width: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """[T] indices into this rank's slice, 0 where the target is not in it; [T] bool, if it is."""
    local = targets - group.rank() * width
    here = (local >= 0) & (local < width)
    return local.where(here, 0), here


def _statistics(logits: Tensor, local: Tensor, temperature: float) -> Tensor:
    """[4, t]: largest logit, sum of exponents below it, its sum with the logits, the target's."""
    if logits.is_cuda:
        from relax_hpc.engines.megatron.layers import kernels  # needs Triton

        return kernels.logit_statistics(logits, local, temperature)
    x = logits.float() / temperature
    top = x.amax(-1)
    weights = (x - top[:, None]).exp()
    chosen = logits.gather(1, local[:, None])[:, 0].float() / temperature
    return torch.stack([top, weights.sum(-1), (weights * x).sum(-1), chosen])


def _combined(
    stats: Tensor, here: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """[T] logprobs, entropy and log of the sum of exponents, of the whole vocabulary."""
    tops, sums, moments, chosen = stats
    chosen = chosen.where(here, 0)
    if group.size() > 1:
        top = tops.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        rescale = (tops - top).exp()
        stacked = torch.stack([sums * rescale, moments * rescale, chosen])
        dist.all_reduce(stacked, group=group)
        tops, (sums, moments, chosen) = top, stacked.unbind()
    normalizer = tops + sums.log()
    return chosen - normalizer, normalizer - moments / sums, normalizer


@compiled_on_gpu
def _logits_gradient(
    logits: Tensor,
    local: Tensor,
    here: Tensor,
    normalizer: Tensor,
    grad: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """[t, V/tp]: (onehot(target) - softmax) / temperature, times the logprob's gradient."""
    scaled = (grad / temperature)[:, None]
    softmax = (logits.float() / temperature - normalizer[:, None]).exp()
    column = torch.arange(logits.shape[1], device=logits.device)
    is_target = (column == local[:, None]) & here[:, None]
    return (scaled * (is_target.float() - softmax)).to(dtype)
