"""Who shares what: tensor, pipeline, context, expert and data parallelism of this process."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from relax_hpc.config.actor import ActorConfig
from relax_hpc.engines.megatron.transformer import sequence_parallel


def initialize(actor: ActorConfig) -> None:
    """Makes Megatron's process groups, if they are not there. Collective over all ranks."""
    if mpu.model_parallel_is_initialized():
        return
    mpu.initialize_model_parallel(
        actor.tensor_parallel,
        actor.pipeline_parallel,
        actor.virtual_pipeline if actor.virtual_pipeline > 1 else None,
        context_parallel_size=actor.context_parallel,
        expert_model_parallel_size=actor.expert_parallel,
        expert_tensor_parallel_size=actor.expert_tensor_parallel,
    )


def tokens_multiple_of(actor: ActorConfig) -> int:
    """What divides the tokens of a micro-batch, padding included."""
    chunks = 2 * actor.context_parallel if actor.context_parallel > 1 else 1
    return chunks * (actor.tensor_parallel if sequence_parallel(actor) else 1)


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
    """What the last stage of this rank's pipeline passes in, on all its stages."""
    group = mpu.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, mpu.get_pipeline_model_parallel_last_rank(), group=group)
    return box[0]
