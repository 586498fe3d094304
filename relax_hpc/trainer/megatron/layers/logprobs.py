"""Computes logprobs of given tokens from hidden states or logits, the vocabulary split over ranks.

T = tokens, V = vocabulary, V/tp of it on this rank, h = hidden size. The output layer is part of
it: logits exist for one chunk of tokens at a time, and are recomputed for the gradient, so that no
tensor of size [T, V] ever exists. Statistics are float32.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.runtime.devices import compile_on_gpu
from relax_hpc.trainer.megatron.layers.gradient_fusion import add_product

_CHUNK_BYTES = 5 << 28
"""Limit of a chunk's logits; their gradient takes as much again."""
_TILE = 128
"""Tokens of a chunk are a multiple, if there are several: products are computed in such tiles."""
_GIB = 1 << 30


class LogprobHead(NamedTuple):
    """The settings that turn hidden states into logprobs."""

    temperature: float
    group: dist.ProcessGroup
    """Tensor-parallel ranks, in the order of their slices."""
    float32_logits: bool = False
    """Whether not to round logits to the dtype of the weights."""
    kept_gib: float = 0.0
    """Size of logits kept for the gradient rather than recomputed."""
    entropy_gradient: bool = False
    """Whether the entropy gets a gradient, in the same pass over the logits."""

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[t, V/tp]."""
        if not self.float32_logits or hidden.dtype == torch.float32:
            return hidden @ weight.t()
        if hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.float().t()


def hidden_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, head: LogprobHead
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities under softmax(hidden @ weight.T / temperature).

    The weight's gradient is added to its `main_grad`, if Megatron has made one.

    Args:
        hidden: [T, h], the same on every rank of the head's group; its gradient is this rank's
            share of their sum.
        weight: [V/tp, h].
        targets: [T] int64 token ids in 0..V-1, the same on every rank of the group.

    Returns:
        [T] nats, logprob of the target, with gradient; [T] nats, entropy, without by default.
    """
    if not torch.is_grad_enabled():
        head = head._replace(kept_gib=0.0)
    return _hidden_logprobs(hidden, weight, targets, head)


class _HiddenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: LogprobHead,
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
        logprobs, entropy, normalizer = _combine(stats, here, head.group)
        ctx.head, ctx.kept = head, kept
        if head.entropy_gradient:
            ctx.save_for_backward(hidden, weight, local, here, normalizer, entropy)
        else:
            ctx.save_for_backward(hidden, weight, local, here, normalizer)
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
        entropy_grad: Tensor,
    ) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, local, here, normalizer, *of_entropy = ctx.saved_tensors
        head = ctx.head
        if of_entropy:
            of_entropy.append(entropy_grad)
        main_grad = getattr(weight, "main_grad", None)
        weight_grad = main_grad
        learns = ctx.needs_input_grad[1]
        if weight_grad is None and learns:
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        hidden_grad = torch.empty_like(hidden)
        kept = ctx.kept
        for part in _chunks(len(hidden), weight.shape[0], head):
            logits = kept.pop(0) if kept else head.logits(hidden[part], weight)
            logits_grad = _logits_gradient(
                logits, local[part], here[part], normalizer[part], grad[part],
                head.temperature, hidden.dtype, *(values[part] for values in of_entropy),
            )  # fmt: skip
            del logits
            torch.mm(logits_grad, weight, out=hidden_grad[part])
            if weight_grad is not None:
                add_product(weight_grad, logits_grad.t(), hidden[part])
        if weight_grad is None:
            return hidden_grad, None, None, None
        if main_grad is None:
            return hidden_grad, weight_grad.to(weight.dtype), None, None
        weight.grad_added_to_main_grad = True  # Megatron's hook then adds nothing
        return hidden_grad, weight.new_zeros(1).expand_as(weight), None, None


_hidden_logprobs: Callable[..., tuple[Tensor, Tensor]] = _HiddenLogprobs.apply


def _chunks(num_tokens: int, vocabulary: int, head: LogprobHead) -> Iterator[slice]:
    """Yields chunks of equal size if possible: then the compiled parts see one shape."""
    most = max(1, _CHUNK_BYTES // (vocabulary * (4 if head.float32_logits else 2)))
    count = -(-num_tokens // most)
    size = max(1, -(-num_tokens // max(count, 1)))
    if most >= _TILE < size < num_tokens:
        size = min(-(-size // _TILE), most // _TILE) * _TILE
    for start in range(0, num_tokens, size):
        yield slice(start, start + size)


def _local(targets: Tensor, width: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Returns [T] indices into this rank's slice, 0 if the target is elsewhere; [T] bool, if it is
    here."""
    local = targets - group.rank() * width
    here = (local >= 0) & (local < width)
    return local.where(here, 0), here


def _statistics(logits: Tensor, local: Tensor, temperature: float) -> Tensor:
    """Returns [4, t]: largest logit, sum of exponentials below it, its sum with the logits, the
    target's."""
    if logits.is_cuda:
        from relax_hpc.trainer.megatron.layers import kernels  # needs Triton

        return kernels.logit_statistics(logits, local, temperature)
    x = logits.float() / temperature
    top = x.amax(-1)
    weights = (x - top[:, None]).exp()
    chosen = logits.gather(1, local[:, None])[:, 0].float() / temperature
    return torch.stack([top, weights.sum(-1), (weights * x).sum(-1), chosen])


def _combine(
    stats: Tensor, here: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns [T] logprobs, entropy and logsumexp over the whole vocabulary."""
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


@compile_on_gpu
def _logits_gradient(
    logits: Tensor,
    local: Tensor,
    here: Tensor,
    normalizer: Tensor,
    grad: Tensor,
    temperature: float,
    dtype: torch.dtype,
    entropy: Tensor | None = None,
    entropy_grad: Tensor | None = None,
) -> Tensor:
    """[t, V/tp], with p the softmax and H the entropy:

    (grad (onehot(target) - p) - entropy_grad p (log p + H)) / temperature
    """
    scaled = (grad / temperature)[:, None]
    log_softmax = logits.float() / temperature - normalizer[:, None]
    softmax = log_softmax.exp()
    column = torch.arange(logits.shape[1], device=logits.device)
    is_target = ((column == local[:, None]) & here[:, None]).float()
    if entropy is None or entropy_grad is None:
        return (scaled * (is_target - softmax)).to(dtype)
    # One multiplication and addition per logit more: the rest is of rows.
    of_entropy = (entropy_grad / temperature)[:, None]
    rest = scaled + of_entropy * entropy[:, None]
    out = scaled * is_target - softmax * (rest + of_entropy * log_softmax)
    return out.to(dtype)
