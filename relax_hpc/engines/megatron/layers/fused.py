"""The layers between the matrix products, each in one pass over memory on GPUs.

Norms, rotary positions and SwiGLU with their gradients by hand, so that it is said here what is
kept for the backward pass. Everything is float32 inside. The plain torch here says what is meant;
on GPUs Triton kernels or torch's compiler take its place.
T = tokens, d = channels of a head.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from relax_hpc.devices import compiled_on_gpu


def _kernels() -> ModuleType:
    from relax_hpc.engines.megatron.layers import (
        kernels,  # needs Triton, which comes with torch for GPUs
    )

    return kernels


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., h], contiguous -> [..., h], as Hugging Face computes it. Keeps `hidden`."""
    return _rms_norm(hidden, weight, eps)[0]


def rms_norm_beside(hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Does as `rms_norm`, and returns `hidden` again, for what goes past the norm.

    Its gradient is added in the pass over memory that makes the norm's.
    """
    return _rms_norm(hidden, weight, eps)


def norm_and_rotate(
    mixed: Tensor, query_weight: Tensor, key_weight: Tensor, rotation: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the product of the qkv layer; normalises and rotates queries and keys.

    Args:
        mixed: [T, query groups, n + 2, d]: n queries, a key and a value.
        query_weight: [d], and `key_weight`: of the norms.
        rotation: [T, 2, d / 2] float32, cosines and sines.

    Returns:
        [T, query groups * n, d]; [T, query groups, d] twice. Keeps `mixed`.
    """
    return _norm_and_rotate(mixed, query_weight, key_weight, rotation, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 f], gate then up -> [..., f]. Keeps `gate_up`."""
    return _swiglu(gate_up)


@contextmanager
def recomputed(output: Tensor, again: Callable[[], Tensor]) -> Iterator[None]:
    """Makes what is called inside keep no `output` for the backward pass, but call `again` then."""
    again_marker, place = object(), (output.data_ptr(), output.shape)

    def keep(tensor: Tensor) -> object:  # lives as long as what it keeps: must not hold `output`
        return again_marker if (tensor.data_ptr(), tensor.shape) == place else tensor

    def give(kept: object) -> Tensor:
        if kept is not again_marker:
            assert isinstance(kept, Tensor)
            return kept
        with torch.no_grad():
            return again()

    if not torch.is_grad_enabled():
        yield
        return
    with saved_tensors_hooks(keep, give):
        yield


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        if hidden.is_cuda:
            return _kernels().rms_norm_forward(hidden, weight, eps), hidden
        return weight * _normalised(hidden, eps)[0].to(hidden.dtype), hidden

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: Tensor | None,
        beside: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        if grad is None:
            return beside, None, None
        if hidden.is_cuda:
            grad, beside = grad.contiguous(), beside if beside is None else beside.contiguous()
            return *_kernels().rms_norm_backward(hidden, weight, grad, beside, ctx.eps), None
        return *_norm_backward(hidden, weight, grad, beside, ctx.eps), None


def _norm_backward(
    hidden: Tensor, weight: Tensor, grad: Tensor, beside: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    normalised, inverse = _normalised(hidden, eps)
    grad = grad.float()
    by_token = tuple(range(hidden.ndim - 1))
    weight_grad = (grad * normalised).sum(by_token).to(weight.dtype)
    gradient = _norm_gradient(grad * weight, normalised, inverse)
    return (gradient if beside is None else gradient + beside).to(hidden.dtype), weight_grad


def _normalised(hidden: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = hidden.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * inverse, inverse


def _norm_gradient(grad: Tensor, normalised: Tensor, inverse: Tensor) -> Tensor:
    return inverse * (grad - normalised * (grad * normalised).mean(-1, keepdim=True))


class _NormAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        mixed: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        rotation: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(mixed, query_weight, key_weight, rotation)
        ctx.eps = eps
        forward = _kernels().norm_and_rotate_forward if _has_kernel(mixed) else _rotate_forward
        return forward(mixed, query_weight, key_weight, rotation, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        mixed, query_weight, key_weight, rotation = ctx.saved_tensors
        query, key, value = grads
        backward = _kernels().norm_and_rotate_backward if _has_kernel(mixed) else _rotate_backward
        by_input = backward(mixed, query_weight, key_weight, rotation, query, key, value, ctx.eps)
        return *by_input, None, None


def _has_kernel(mixed: Tensor) -> bool:
    half = mixed.shape[-1] // 2
    return mixed.is_cuda and half & (half - 1) == 0


def _rotate_forward(
    mixed: Tensor, query_weight: Tensor, key_weight: Tensor, rotation: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = rotation[:, None, None, 0], rotation[:, None, None, 1]

    def rotated(part: Tensor, weight: Tensor) -> Tensor:
        normalised = weight * _normalised(part, eps)[0].to(part.dtype)
        first, second = normalised.float().chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return turned.to(part.dtype).flatten(1, 2)

    return (
        rotated(mixed[:, :, :-2], query_weight),
        rotated(mixed[:, :, -2:-1], key_weight),
        mixed[:, :, -1].contiguous(),
    )


def _rotate_backward(
    mixed: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    rotation: Tensor,
    query_grad: Tensor,
    key_grad: Tensor,
    value_grad: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = rotation[:, None, None, 0], rotation[:, None, None, 1]
    num_groups = mixed.shape[1]

    def unrotated(part: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        first, second = grad.view(len(grad), num_groups, -1, grad.shape[2]).float().chunk(2, dim=-1)
        back = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
        normalised, inverse = _normalised(part, eps)
        weight_grad = (back * normalised).sum((0, 1, 2)).to(weight.dtype)
        return _norm_gradient(back * weight, normalised, inverse).to(part.dtype), weight_grad

    queries, for_query_weight = unrotated(mixed[:, :, :-2], query_weight, query_grad)
    keys, for_key_weight = unrotated(mixed[:, :, -2:-1], key_weight, key_grad)
    return (
        torch.cat([queries, keys, value_grad[:, :, None]], dim=2),
        for_query_weight,
        for_key_weight,
    )


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(gate_up)
        return _swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        (gate_up,) = ctx.saved_tensors
        if gate_up.is_cuda:
            out: Tensor = _kernels().swiglu_backward(gate_up, grad.contiguous())
            return out
        return _swiglu_backward(gate_up, grad)


@compiled_on_gpu
def _swiglu_forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def _swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    wide = grad.float()
    sigmoid = torch.sigmoid(gate)
    gate_grad = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([gate_grad, wide * gate * sigmoid], dim=-1).to(gate_up.dtype)


_rms_norm: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] = _RMSNorm.apply
_norm_and_rotate: Callable[..., tuple[Tensor, Tensor, Tensor]] = _NormAndRotate.apply
_swiglu: Callable[[Tensor], Tensor] = _Swiglu.apply
