"""Weight gradients added to Megatron's float32 buffer by the matrix product itself.

Megatron-core has a place for it and an extension of Apex in mind, `fused_weight_gradient_mlp_cuda`;
torch's own product with a float32 result does as well, and rounds nothing to 16 bits in between.
"""

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor


def install() -> bool:
    """Fills that place, unless Apex does or there is no GPU; whether the fusion may be used."""
    if not torch.cuda.is_available():
        return False
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = _Products
        layers._grad_accum_fusion_available = True
    return True


class _Products:
    """The extension's functions, as Megatron calls them."""

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
