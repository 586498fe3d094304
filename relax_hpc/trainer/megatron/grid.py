"""Sets up tensor, pipeline, context, expert and data parallelism, and splits tokens over ranks.

T tokens of a micro-batch lie in `2 * size` equal chunks; context-parallel rank r owns chunks r and
2 * size - 1 - r, in this order. Work grows towards the end of a document, so this balances the
ranks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from relax_hpc.config.model import Layout
from relax_hpc.runtime.comm.torch_group import broadcast_json, deaf_afterwards

FloatArray = npt.NDArray[np.float32]


def initialize(layout: Layout, *, timeout_s: float = 1800) -> None:
    """Makes Megatron's process groups, if missing. Collective over all ranks.

    Args:
        timeout_s: longest wait for a rank in one of their collectives.
    """
    if mpu.model_parallel_is_initialized():
        return
    with deaf_afterwards():
        mpu.initialize_model_parallel(
            layout.tensor_parallel,
            layout.pipeline_parallel,
            layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
            context_parallel_size=layout.context_parallel,
            expert_model_parallel_size=layout.expert_parallel,
            expert_tensor_parallel_size=layout.expert_tensor_parallel,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
        )


def tokens_multiple_of(layout: Layout) -> int:
    """Returns a divisor that micro-batches need in their tokens, padding included."""
    chunks = 2 * layout.context_parallel if layout.context_parallel > 1 else 1
    return chunks * (layout.tensor_parallel if layout.is_sequence_parallel else 1)


def context_group() -> dist.ProcessGroup | None:
    """Returns the ranks that share the tokens of a micro-batch, if there are several."""
    group: dist.ProcessGroup = mpu.get_context_parallel_group()
    return group if group.size() > 1 else None


def own_tokens(values: Tensor) -> Tensor:
    """[T, ...] -> part of this tensor-parallel rank under sequence parallelism."""
    group = mpu.get_tensor_model_parallel_group()
    own: Tensor = torch.chunk(values, group.size())[group.rank()]
    return own


def is_last_stage() -> bool:
    return bool(mpu.is_pipeline_last_stage())


def from_last_stage(value: Any) -> Any:  # noqa: ANN401
    """Returns the last stage's `value` on all stages of this rank's pipeline, by way of JSON.

    See `comm.torch_group`. A tuple becomes a list, also with a single stage.
    """
    group = mpu.get_pipeline_model_parallel_group()
    return broadcast_json(value, group.size() - 1, group)


def arrays_from_last_stage(arrays: Sequence[FloatArray]) -> list[FloatArray]:
    """Returns the last stage's arrays, [any length] float32, on all stages of the pipeline."""
    group = mpu.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return list(arrays)
    lengths: list[int] = from_last_stage([len(array) for array in arrays])
    if not lengths:
        return []
    if is_last_stage():
        flat = torch.from_numpy(np.concatenate(arrays))
    else:
        flat = torch.empty(sum(lengths), dtype=torch.float32)
    dist.broadcast(flat, group=group, group_src=group.size() - 1)
    return [part.numpy() for part in torch.split(flat, lengths)]


def chunks(total: int, size: int, rank: int) -> list[tuple[int, int]]:
    """Returns [start, end) of a rank's chunks; the whole for a size of 1."""
    if size == 1:
        return [(0, total)]
    width, rest = divmod(total, 2 * size)
    assert rest == 0, f"{total} tokens do not divide into {2 * size} chunks"
    return [(c * width, (c + 1) * width) for c in (rank, 2 * size - 1 - rank)]


def own_part(values: Tensor) -> Tensor:
    """[T, ...] -> [T / size, ...] of this context-parallel rank."""
    group = context_group()
    return values if group is None else _take_part(values, group)


def whole(values: Tensor) -> Tensor:
    """Inverts `own_part`, on every rank alike.

    All ranks have to compute the same from it: the gradient is this rank's part, not a sum over
    ranks.
    """
    group = context_group()
    return values if group is None else _gather(values, group)


def _take_part(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, ...] of all -> [T / size, ...] of a rank of the group."""
    parts = chunks(len(values), group.size(), group.rank())
    return torch.cat([values[start:end] for start, end in parts])


def gather_keys(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """[T / size, groups, d] twice -> [T, groups, d] twice; the gradient is summed over ranks."""
    return _gather_and_sum(key, group), _gather_and_sum(value, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return _all_gather(values, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _take_part(grad, ctx.group), None


class _GatherAndSum(_Gather):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        group = ctx.group
        by_rank = _chunk(grad, group.size())[_make_owned_order(group.size())]
        mine = grad.new_empty(len(grad) // group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(mine, by_rank.flatten(0, 1), group=group)
        return mine, None


_gather: Callable[[Tensor, dist.ProcessGroup], Tensor] = _Gather.apply
_gather_and_sum: Callable[[Tensor, dist.ProcessGroup], Tensor] = _GatherAndSum.apply


def _make_owned_order(size: int) -> list[int]:
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]


def _all_gather(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    gathered = values.new_empty(len(values) * size, *values.shape[1:])
    dist.all_gather_into_tensor(gathered, values.contiguous(), group=group)
    order = _make_owned_order(size)
    places = [order.index(chunk) for chunk in range(2 * size)]
    return _chunk(gathered, size)[places].flatten(0, 1)


def _chunk(values: Tensor, size: int) -> Tensor:
    """[T, ...] -> [2 * size, T / (2 * size), ...]."""
    return values.view(2 * size, -1, *values.shape[1:])
