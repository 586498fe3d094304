"""The turning of queries and keys by their positions, in one pass over memory on a GPU."""

from typing import Any, cast

import torch
from torch import Tensor

from relax_hpc.devices import compiled_on_gpu


def rotated(heads: Tensor, rotation: Tensor) -> Tensor:
    """Turns channel i and channel i + d / 2 of every head by the i-th angle, in float32.

    Args:
        heads: [T, ..., d], queries or keys.
        rotation: [T, 2, d / 2] float32, cosines and sines of the angles of each position.

    Returns:
        As `heads`, contiguous.
    """
    return cast(Tensor, _Rotated.apply(heads, rotation))  # type: ignore[no-untyped-call]


class _Rotated(torch.autograd.Function):
    """Turns, and turns the gradient back: nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, rotation: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(rotation)
        cosine, sine = rotation.unbind(1)
        return _turned(heads, cosine, sine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        cosine, sine = ctx.saved_tensors[0].unbind(1)
        return _turned(grad, cosine, -sine), None


@compiled_on_gpu
def _turned(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    cosine, sine = (
        part.view(len(part), *[1] * (heads.ndim - 2), part.shape[1]) for part in (cosine, sine)
    )
    first, second = heads.float().chunk(2, dim=-1)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat(turned, dim=-1).to(heads.dtype)
