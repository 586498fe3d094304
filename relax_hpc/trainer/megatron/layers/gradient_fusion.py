"""Adds weight gradients to Megatron's float32 buffer in the matrix product itself.

Megatron-core has a hook for Apex's extension, `fused_weight_gradient_mlp_cuda`. Torch's own product
with a float32 result does as well, without rounding to 16 bits in between.

The embedding adds its gradient row by row. Torch's would make a gradient of the whole vocabulary,
to be zeroed, filled and added, and would wait for the device to count the rows in it.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding, layers
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import functional


def install() -> bool:
    """Fills the hook, unless Apex does or there is no GPU; returns whether fusion may be used."""
    if not torch.cuda.is_available():
        return False
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = _Products
        layers._grad_accum_fusion_available = True
    return True


class _Products:
    """Apex's functions, as Megatron calls them."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        """main_grad [out, in] += grad.T [out, T] @ inputs [T, in]."""
        add_product(main_grad, grad.t(), inputs)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32  # what Megatron calls for 16-bit buffers


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in float32 if `total` is, without a product in between on GPUs."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += (left @ right).to(total.dtype)


class RowsEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """Megatron's embedding; unchanged without a gradient buffer."""

    is_output: bool
    """Whether the weight is the output layer's, too, whose gradient notifies Megatron."""

    @classmethod
    def replace(cls, embedding: VocabParallelEmbedding, *, is_output: bool) -> None:
        """Converts an embedding; only this class and the output layer may use its weight."""
        embedding.__class__ = cls
        embedding.is_output = is_output
        embedding.weight.zero_out_wgrad = False  # nothing is left for Megatron's hook to add

    def forward(self, ids: Tensor) -> Tensor:
        """[1, T] -> [1, T, h]; under sequence parallelism [T / tp, 1, h]."""
        out: Tensor
        if not hasattr(self.weight, "main_grad") or not torch.is_grad_enabled():
            out = super().forward(ids)
            return out
        rows = _rows(ids, self.weight, self.vocab_start_index, self.is_output)
        if self.reduce_scatter_embeddings:
            rows = rows.transpose(0, 1).contiguous()
            out = reduce_scatter_to_sequence_parallel_region(rows, group=self.tp_group)
        else:
            out = reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)
        return out


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        ids: Tensor,
        weight: Tensor,
        first: int,
        is_output: bool,
    ) -> Tensor:
        local = ids - first
        here = (local >= 0) & (local < len(weight))
        local = local.where(here, 0)
        ctx.save_for_backward(local, here, weight)
        ctx.is_output = is_output
        return functional.embedding(local, weight).where(here[..., None], 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:  # noqa: ANN401
        local, here, weight = ctx.saved_tensors
        total = weight.main_grad
        rows = grad.where(here[..., None], 0).to(total.dtype)
        total.index_add_(0, local.flatten(), rows.flatten(0, -2))
        weight.grad_added_to_main_grad = True
        nothing = None if ctx.is_output else weight.new_zeros(1).expand_as(weight)
        return None, nothing, None, None


_rows: Callable[[Tensor, Tensor, int, bool], Tensor] = _Rows.apply
