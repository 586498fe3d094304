"""The tensor, pipeline, context, expert and data parallelism of this process."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from relax_hpc.comm.collectives import broadcast_json
from relax_hpc.config.layout import Layout

FloatArray = npt.NDArray[np.float32]


def initialize(layout: Layout, *, timeout_s: float = 1800) -> None:
    """Makes Megatron's process groups, if they are not there. Collective over all ranks.

    Args:
        layout: of the ranks.
        timeout_s: how long a rank may be silent in a collective of one of them.
    """
    if mpu.model_parallel_is_initialized():
        return
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
    """Returns the number that divides the tokens of a micro-batch, padding included."""
    chunks = 2 * layout.context_parallel if layout.context_parallel > 1 else 1
    return chunks * (layout.tensor_parallel if layout.is_sequence_parallel else 1)


def context_group() -> dist.ProcessGroup | None:
    """Ranks that share the tokens of a micro-batch, if there are several."""
    group: dist.ProcessGroup = mpu.get_context_parallel_group()
    return group if group.size() > 1 else None


def own_tokens(values: Tensor) -> Tensor:
    """[T, ...] -> those of this tensor-parallel rank under sequence parallelism."""
    group = mpu.get_tensor_model_parallel_group()
    own: Tensor = torch.chunk(values, group.size())[group.rank()]
    return own


def is_last_stage() -> bool:
    """Whether this rank computes losses."""
    return bool(mpu.is_pipeline_last_stage())


def from_last_stage(value: Any) -> Any:  # noqa: ANN401
    """Returns the last stage's `value` on all stages of this rank's pipeline; it travels as JSON.

    See `comm.collectives`; where there is one stage, too, a tuple becomes a list.
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
