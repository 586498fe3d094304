"""Triton kernels of `permutation` and `experts` on GPUs: each reads and writes everything once.

Everything is float32 inside. Only imported where there is a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """See `permutation.take`."""
    width = rows.shape[1]
    out = rows.new_empty(len(index), width)
    if out.numel():
        _take_rows[(len(index), triton.cdiv(width, 2048))](
            rows, index, out, width, BLOCK=min(2048, triton.next_power_of_2(width)), num_warps=4
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _take_rows(rows, index, out, width, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001, N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = tl.load(index + row).to(tl.int64) * width
    tl.store(out + row * width + column, tl.load(rows + source + column, mask=inside), mask=inside)


def sum_rows(rows: Tensor, slots: Tensor) -> Tensor:
    """See `permutation.total`."""
    width = rows.shape[1]
    out = rows.new_empty(len(slots), width)
    if out.numel():
        _sum_rows[(len(slots), triton.cdiv(width, 2048))](
            rows, slots, out, width, SLOTS=slots.shape[1],
            BLOCK=min(2048, triton.next_power_of_2(width)), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows(rows, slots, out, width, SLOTS: tl.constexpr, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001, N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(SLOTS):
        source = tl.load(slots + row * SLOTS + slot).to(tl.int64)
        here = inside & (source >= 0)
        total += tl.load(rows + source * width + column, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


def weighted_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    """See `experts.weighted_swiglu`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if out.numel():
        _swiglu_forward[(rows,)](
            gate_up,
            weights,
            out,
            width,
            BLOCK=triton.next_power_of_2(width),
            num_warps=_warps(width),
        )
    return out


def weighted_swiglu_backward(
    gate_up: Tensor, weights: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `experts.weighted_swiglu_backward`."""
    rows, width = grad.shape
    out, gate_up_grad = torch.empty_like(grad), torch.empty_like(gate_up)
    weights_grad = torch.empty_like(weights)
    if grad.numel():
        _swiglu_backward[(rows,)](
            gate_up, weights, grad, out, gate_up_grad, weights_grad, width,
            BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
        )  # fmt: skip
    return out, gate_up_grad, weights_grad


def _warps(width: int) -> int:
    return 8 if width > 2048 else 4


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_forward(gate_up, weights, out, width, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001, N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + row).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up * weight
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_backward(  # type: ignore[no-untyped-def]
    gate_up, weights, grad, out, gate_up_grad, weights_grad, width, BLOCK: tl.constexpr  # noqa: ANN001, N803
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    wide, narrow = row * 2 * width + column, row * width + column
    gate = tl.load(gate_up + wide, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + wide + width, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + narrow, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + row).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    kind = out.dtype.element_ty
    tl.store(out + narrow, (silu * up * weight).to(kind), mask=inside)
    tl.store(weights_grad + row, tl.sum(g * silu * up, 0).to(weights_grad.dtype.element_ty))
    g *= weight
    for_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(gate_up_grad + wide, for_gate.to(kind), mask=inside)
    tl.store(gate_up_grad + wide + width, (g * silu).to(kind), mask=inside)
