"""Megatron's DDP and distributed Adam, made once; one guarded update.

Gradients are sums over tokens until Adam reads them: their mean and the clipping are one factor.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from relax_hpc.config.optimizer import OptimizerConfig
from relax_hpc.engines.megatron import grid
from relax_hpc.engines.megatron.optimizer.adam import Shard, ShardedAdamW
from relax_hpc.engines.megatron.optimizer.settings import ddp_config, optimizer_config


def build(
    config: OptimizerConfig, chunks: Sequence[GPTModel], dtype: str
) -> tuple[list[DistributedDataParallel], ChainedOptimizer]:
    """Wraps the chunks of the model, which must hold its weights: the optimizer copies them.

    Each data-parallel rank keeps a part of the main parameters, float32, and of Adam's moments.

    Raises:
        ConfigError: its `ddp` or `megatron` is wrong; no room to offload to.
    """
    wrapped = [
        DistributedDataParallel(chunk.config, ddp_config(config, dtype), chunk) for chunk in chunks
    ]
    optimizer = get_megatron_optimizer(optimizer_config(config, dtype), wrapped)
    for group in optimizer.param_groups:  # Megatron leaves this to its scheduler; norms get 0
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    _use_own_adam(optimizer, config)
    if loss_scale(optimizer):
        chunks[0].config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


def _use_own_adam(optimizer: ChainedOptimizer, config: OptimizerConfig) -> None:
    """Megatron's is Torch's, Apex's or Transformer Engine's, by what is installed; ours is one."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            part.optimizer = ShardedAdamW(
                part.optimizer.param_groups,
                _shards(part),
                moments=getattr(torch, config.moments),
                offload=config.offload,
            )


def _shards(part: DistributedOptimizer) -> list[Shard]:
    """Returns all that this rank updates, as views of Megatron's buffers."""
    if part.is_stub_optimizer:
        return []
    shards = []
    for models, mains in (
        (part.model_fp32_groups, part.shard_fp32_groups),
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
    ):
        for parameter, main in zip(chain(*models), chain(*mains), strict=True):
            of = part._get_model_param_range_map(parameter)
            own, in_bucket = of["param"], of["gbuf_world_in_bucket"]
            number, _, bucket = part.model_param_gbuf_map[parameter]
            weights = part.buffers[number].buckets[bucket].param_data.view(-1)
            shards.append(
                Shard(
                    main,
                    parameter.main_grad.view(-1)[own.start : own.end],
                    None if main.dtype == parameter.dtype
                    else weights[in_bucket.start : in_bucket.end],
                )
            )  # fmt: skip
    return shards


def set_learning_rate(optimizer: ChainedOptimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def total(count: Tensor) -> float:
    """A count of the whole batch; a pipeline's last stage counts, context-parallel ranks alike.

    Args:
        count: [] int64 or float64, of this rank.
    """
    dist.all_reduce(count, group=mpu.get_data_parallel_group())
    return float(grid.from_last_stage(float(count)))


class Update(NamedTuple):
    """The outcome of an update."""

    norm: float
    """Norm of the whole model's gradient, before clipping."""
    done: bool
    """Whether the weights changed."""
    has_overflowed: bool = False
    """It was not done since the loss scale of float16 was too large, which is smaller now."""


class Gradients(NamedTuple):
    """Reduced ones, per part of the optimizer."""

    shards: list[list[Shard]]
    squared: list[Tensor]
    """[] float64 squared norms over all ranks; the device may still be at it."""


def gradients(optimizer: ChainedOptimizer) -> Gradients:
    """Returns what `update` applies, once gradients are reduced.

    Collective. A step's first look at a value of the device comes after it: then the device has
    the backward pass to do while this is put together.
    """
    shards = [_shards(part) for part in optimizer.chained_optimizers]
    squared = [
        _squared_norm(part, of_part)
        for part, of_part in zip(optimizer.chained_optimizers, shards, strict=True)
    ]
    return Gradients(shards, squared)


def update(optimizer: ChainedOptimizer, found: Gradients, scale: float) -> Update:
    """Clips and applies the gradients times `scale`, unless they are not finite."""
    before = loss_scale(optimizer)
    scale /= before or 1.0
    norm = scale * math.sqrt(sum(map(float, found.squared)))
    if before:
        for part in optimizer.chained_optimizers:
            part.grad_scaler.update(not math.isfinite(norm))
    if not math.isfinite(norm):
        return Update(norm, False, loss_scale(optimizer) != before)
    largest = optimizer.config.clip_grad
    if 0 < largest < norm:
        scale *= largest / (norm + 1e-6)
    for part, shards in zip(optimizer.chained_optimizers, found.shards, strict=True):
        if shards:
            part.optimizer.update(shards, scale)
    for chunk in optimizer.model_chunks:
        chunk.start_param_sync()
    return Update(norm, True)


def weights_are_finite(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether the whole model's weights have a norm, on every rank the same answer. Collective.

    It reads those that learn once. A norm beyond float32 counts as none: such weights compute
    nothing.
    """
    every = (parameter for chunk in chunks for parameter in chunk.parameters())
    weights = [parameter.detach() for parameter in every if parameter.requires_grad]
    norms = torch._foreach_norm(weights, dtype=torch.float32)
    total = torch.stack(norms).square().sum()
    dist.all_reduce(total)
    return math.isfinite(float(total))


def loss_scale(optimizer: ChainedOptimizer) -> float | None:
    """Returns the factor of losses before their gradient; None without float16."""
    if optimizer.chained_optimizers[0].grad_scaler is None:
        return None
    return float(optimizer.get_loss_scale())


def _squared_norm(part: DistributedOptimizer, shards: Sequence[Shard]) -> Tensor:
    """[] float64, over all ranks that hold a part of the gradient; what ranks share counts once.

    As Megatron's, which without Apex waits for the device once per parameter.
    """
    gradients = [
        shard.grad
        for shard in shards
        if param_is_not_shared(shard.main)
        and param_is_not_tensor_parallel_duplicate(shard.main, part.tp_group)
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        norms = torch._foreach_norm(gradients, dtype=torch.float32)
        total += torch.stack(norms).double().square().sum()
    dist.all_reduce(total, group=part.get_grad_stats_parallel_group())
    return total
