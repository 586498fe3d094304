"""Wraps Megatron's DDP and distributed Adam, whose update is our own: in one pass over memory, and
guarded.

Gradients are sums over tokens until Adam reads them: their mean and the clipping are one factor.
With `overlap_grad_reduce` the sum over data-parallel ranks begins once a gradient is final, in the
last micro-batch of the batch's last portion. Otherwise Megatron sums everything at the batch's end.

bfloat16 moments are rounded stochastically. With rounding to nearest, a moment that changes by less
than 1/256 of itself in a step would stand still: with beta2 = 0.999, the second moment could rise
but never fall.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

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

from relax_hpc.config.model import OptimizerConfig
from relax_hpc.trainer.megatron import grid
from relax_hpc.trainer.megatron.host_memory import HostMemory, stream
from relax_hpc.trainer.megatron.settings import ddp_config, optimizer_config

PIECE = 1 << 24
"""Elements of a shard in host memory that pass through the device at once."""


class ParameterShard(NamedTuple):
    """This rank's part of one parameter; n elements."""

    main: Tensor
    """[n] float32; Adam's parameter."""
    grad: Tensor
    """[n] in the dtype of the gradient buffers, summed over ranks."""
    weight: Tensor | None
    """[n] the weight in use, unless that is `main` itself."""


class AdamStep(NamedTuple):
    """Settings for one parameter's update."""

    grad_scale: float
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    updates: float
    """Updates, this one included."""
    seed: int
    """Seed of the rounding, different for every update and parameter."""


class ShardedAdamW(torch.optim.AdamW):
    """Holds torch's state and groups, where Megatron looks for them; `update` does the update."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        shards: Sequence[ParameterShard],
        *,
        moments: torch.dtype = torch.float32,
        offload: float = 0.0,
    ) -> None:
        """Makes zero state, and moves the offloaded part to host memory.

        Args:
            groups: parameter groups as torch's, with lr, betas, eps and weight_decay.
            moments: float32 or bfloat16.
            offload: fraction of the main parameters and moments kept in host memory; whole
                parameters, and main parameters only if the model has separate weights.
        """
        super().__init__([torch.zeros(0)])
        self.param_groups = groups  # shards of float32 models are views, which torch would refuse
        self._moments = moments
        self._far: set[Tensor] = set()
        self._memory = self._move_out(shards, offload)
        for shard in shards:
            self._make_state(shard)

    @torch.no_grad()
    def update(self, shards: Sequence[ParameterShard], grad_scale: float) -> None:
        """Does one AdamW step with the gradients times `grad_scale`; also sets the weights."""
        of = {shard.main: shard for shard in shards}
        far: list[tuple[ParameterShard, AdamStep]] = []
        of_groups = [(group, main) for group in self.param_groups for main in group["params"]]
        for number, (group, main) in enumerate(of_groups):
            state = self.state[main]
            state["step"] += 1
            count = float(state["step"])
            step = AdamStep(
                grad_scale, group["lr"], group["betas"], group["eps"], group["weight_decay"],
                count, seed=(int(count) * 0x9E3779B1 + number * 0x85EBCA77) & 0x7FFFFFFF,
            )  # fmt: skip
            shard = of[main]
            if main in self._far:
                far.append((shard, step))
            else:
                adamw(*shard, state["exp_avg"], state["exp_avg_sq"], step)
        self._update_far(far)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        raise NotImplementedError("gradients are not the parameters': use update")

    def _move_out(self, shards: Sequence[ParameterShard], fraction: float) -> HostMemory | None:
        room = fraction * sum(shard.main.numel() for shard in shards)
        for shard in shards:
            if 0 < shard.main.numel() <= room:
                room -= shard.main.numel()
                self._far.add(shard.main)
        if not self._far:
            return None
        width = 4 + 2 * self._moments.itemsize
        return HostMemory(
            sum(width * main.numel() + 3 * HostMemory.ALIGNMENT for main in self._far),
            next(iter(self._far)).device,
        )

    def _make_state(self, shard: ParameterShard) -> None:
        state = self.state[shard.main]
        state["step"] = torch.zeros((), dtype=torch.float32)
        for key in ("exp_avg", "exp_avg_sq"):
            if shard.main in self._far:
                assert self._memory is not None
                state[key] = self._memory.take(shard.main.numel(), self._moments).zero_()
            else:
                state[key] = torch.zeros_like(shard.main, dtype=self._moments, requires_grad=False)
        if shard.main in self._far and shard.weight is not None:
            assert self._memory is not None
            shard.main.data = self._memory.take(shard.main.numel(), torch.float32).copy_(shard.main)

    def _update_far(self, far: Sequence[tuple[ParameterShard, AdamStep]]) -> None:
        pieces: list[list[Tensor]] = []
        steps: list[tuple[ParameterShard, AdamStep]] = []
        for shard, step in far:
            state = self.state[shard.main]
            for start in range(0, shard.main.numel(), PIECE):
                part = slice(start, start + PIECE)
                host = [state["exp_avg"][part], state["exp_avg_sq"][part]]
                parts = (None if tensor is None else tensor[part] for tensor in shard)
                near = ParameterShard(*parts)  # type: ignore[arg-type]
                pieces.append(host if shard.weight is None else [*host, near.main])
                steps.append((near, step._replace(seed=step.seed + start)))

        def change(number: int, tensors: list[Tensor]) -> None:
            (shard, step), (first, second, *main) = steps[number], tensors
            adamw(*shard._replace(main=main[0] if main else shard.main), first, second, step)

        if pieces:
            stream(pieces, far[0][0].grad.device, change)


def adamw(
    main: Tensor, grad: Tensor, weight: Tensor | None, first: Tensor, second: Tensor, step: AdamStep
) -> None:
    """Does torch's AdamW step, in place, on tensors of one device.

    Args:
        main: [n] float32.
        grad: [n] any float type.
        weight: [n] gets the new `main`.
        first: and `second`, [n] float32 or bfloat16 moments.
        step: the rounding of element i of bfloat16 moments depends on `seed` + i alone.
    """
    if main.is_cuda:
        from relax_hpc.trainer.megatron.layers import kernels

        kernels.adamw(main, grad, weight, first, second, **step._asdict())
        return
    # In torch's order of operations, so that float32 gives torch's result to the last bit.
    gradient = grad.float() * step.grad_scale
    wide_first, wide_second = first.float(), second.float()
    correction = 1 - step.betas[0] ** step.updates
    root = (1 - step.betas[1] ** step.updates) ** 0.5
    main.mul_(1 - step.lr * step.weight_decay)
    wide_first.lerp_(gradient, 1 - step.betas[0])
    wide_second.mul_(step.betas[1]).addcmul_(gradient, gradient, value=1 - step.betas[1])
    main.addcdiv_(
        wide_first, (wide_second.sqrt() / root).add_(step.eps), value=-step.lr / correction
    )
    if first.dtype is torch.bfloat16:
        bits = noise(step.seed, first.numel())
        first.copy_(round_to_bfloat16(wide_first, bits >> 16))
        second.copy_(round_to_bfloat16(wide_second, bits & 0xFFFF))
    if weight is not None:
        weight.copy_(main)


def noise(seed: int, count: int) -> Tensor:
    """Returns [count] int64 with 32 random bits: an integer hash of seed + i, as in the kernel."""
    value = torch.arange(seed, seed + count) & 0xFFFFFFFF
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    value = ((value ^ (value >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return value ^ (value >> 16)


def round_to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """[n] float32 -> bfloat16, up or down so that the mean over 16 random `bits` is the value."""
    whole = (values.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    return whole.view(torch.float32).to(torch.bfloat16)


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
    """Replaces Megatron's Adam, which is Torch's, Apex's or Transformer Engine's, by our own."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            part.optimizer = ShardedAdamW(
                part.optimizer.param_groups,
                _shards(part),
                moments=getattr(torch, config.moments),
                offload=config.offload,
            )


def _shards(part: DistributedOptimizer) -> list[ParameterShard]:
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
                ParameterShard(
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
    """Returns a count of the whole batch from the last stages; context-parallel ranks have equal
    counts.

    Args:
        count: [] int64 or float64, of this rank.
    """
    dist.all_reduce(count, group=mpu.get_data_parallel_group())
    return float(grid.from_last_stage(float(count)))


class UpdateResult(NamedTuple):
    norm: float
    """Norm of the whole model's gradient, before clipping."""
    done: bool
    has_overflowed: bool = False
    """Whether it was skipped because the loss scale of float16 was too large; it is smaller now."""


class Gradients(NamedTuple):
    """Reduced gradients, per part of the optimizer."""

    shards: list[list[ParameterShard]]
    squared: list[Tensor]
    """[] float64 squared norms over all ranks, maybe still being computed."""


def gradients(optimizer: ChainedOptimizer) -> Gradients:
    """Returns what `update` applies, once gradients are reduced.

    Collective. Call it before the step's first read of a device value: then the CPU prepares this
    during the backward pass.
    """
    shards = [_shards(part) for part in optimizer.chained_optimizers]
    squared = [
        _compute_squared_norm(part, of_part)
        for part, of_part in zip(optimizer.chained_optimizers, shards, strict=True)
    ]
    return Gradients(shards, squared)


def update(optimizer: ChainedOptimizer, found: Gradients, scale: float) -> UpdateResult:
    """Clips and applies the gradients times `scale`, unless they are not finite."""
    before = loss_scale(optimizer)
    scale /= before or 1.0
    norm = scale * math.sqrt(sum(map(float, found.squared)))
    if before:
        for part in optimizer.chained_optimizers:
            part.grad_scaler.update(not math.isfinite(norm))
    if not math.isfinite(norm):
        return UpdateResult(norm, False, loss_scale(optimizer) != before)
    largest = optimizer.config.clip_grad
    if 0 < largest < norm:
        scale *= largest / (norm + 1e-6)
    for part, shards in zip(optimizer.chained_optimizers, found.shards, strict=True):
        if shards:
            part.optimizer.update(shards, scale)
    for chunk in optimizer.model_chunks:
        chunk.start_param_sync()
    return UpdateResult(norm, True)


def weights_are_finite(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether the whole model's weights have a finite norm, the same on every rank. Collective.

    Reads the trained weights once. A norm beyond float32 counts as infinite: such weights are
    useless.
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


def _compute_squared_norm(part: DistributedOptimizer, shards: Sequence[ParameterShard]) -> Tensor:
    """Returns [] float64, over all ranks that hold a part of the gradient; shared parts count once.

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


@contextmanager
def portion(chunks: Sequence[DistributedDataParallel], *, last: bool) -> Iterator[None]:
    """Sums gradients over ranks during the block's micro-batches only if `last`."""
    if not chunks[0].ddp_config.overlap_grad_reduce:
        yield
        return
    until_last = [chunk.no_sync for chunk in chunks]  # for all micro-batches but the last
    with ExitStack() as stack:
        if last:
            chunks[0].config.no_sync_func = until_last if len(chunks) > 1 else until_last[0]
        else:
            chunks[0].config.no_sync_func = None
            for no_sync in until_last:
                stack.enter_context(no_sync())
        yield


def start_rest(chunks: Sequence[DistributedDataParallel]) -> None:
    """Starts the sums that no micro-batch started; Megatron only waits for them, later."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            is_waited_for = chunk.ddp_config.overlap_grad_reduce and not group.is_first_batch
            if is_waited_for and group.grad_reduce_handle is None:
                group.start_grad_sync()
