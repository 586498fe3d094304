"""The embedding, whose gradient is added to Megatron's buffer row by row.

Torch's makes a gradient of the whole vocabulary, to be zeroed, filled and added, and waits for the
device to count the rows that are in it.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import functional


class RowsEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """Megatron's; without a gradient buffer nothing is different."""

    is_output: bool
    """The weight is the output layer's, too, whose gradient tells Megatron of the new ones."""

    @classmethod
    def replace(cls, embedding: VocabParallelEmbedding, *, is_output: bool) -> None:
        """Makes it one of these; nothing but this class and the output layer may use its weight."""
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
