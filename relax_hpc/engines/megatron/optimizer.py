"""Megatron's DDP and distributed Adam, made once; the schedule; one guarded update.

Gradients are sums over tokens until Adam reads them: their mean and the clipping are one factor.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor

from relax_hpc.config import OptimizerConfig
from relax_hpc.engines.megatron import grid


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Rises linearly to `lr` at step `warmup_steps`, then falls by `decay` until `num_steps`.

    Args:
        step: 1-based; beyond `num_steps` the rate stays where it ended.
    """
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    peak = max(config.warmup_steps, 1)
    progress = min(1.0, (step - peak) / (num_steps - peak)) if num_steps > peak else 0.0
    if config.decay == "cosine":
        progress = (1.0 - math.cos(math.pi * progress)) / 2
    return config.lr * (1.0 - progress * (1.0 - config.final_lr_fraction))


def build(
    config: OptimizerConfig, chunks: Sequence[GPTModel]
) -> tuple[list[DistributedDataParallel], ChainedOptimizer]:
    """Wraps the chunks of the model, which must hold its weights: the optimizer copies them.

    Main parameters, gradients and Adam's moments are float32, each data-parallel rank keeps a part.
    """
    params_dtype = chunks[0].config.params_dtype
    wrapped = [
        DistributedDataParallel(
            chunk.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            chunk,
        )
        for chunk in chunks
    ]
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=0.0,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            clip_grad=config.clip_grad,
            bf16=params_dtype is torch.bfloat16,
            params_dtype=params_dtype,
            use_distributed_optimizer=True,
        ),
        wrapped,
    )
    for group in optimizer.param_groups:  # Megatron leaves this to its scheduler; norms get 0
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    _use_one_pass(optimizer)
    _make_state(optimizer)
    return wrapped, optimizer


class OnePassAdamW(torch.optim.AdamW):
    """Torch's, in one pass over memory on a GPU, which multiplies the gradient on its way."""

    grad_scale: float = 1.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates float32 parameters in place."""
        from relax_hpc.engines.megatron import kernels

        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                kernels.adamw(
                    parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"],
                    grad_scale=self.grad_scale, lr=group["lr"], betas=group["betas"],
                    eps=group["eps"], weight_decay=group["weight_decay"],
                    step=float(state["step"]),
                )  # fmt: skip


def _use_one_pass(optimizer: ChainedOptimizer) -> None:
    for part in optimizer.chained_optimizers:
        parameters = [p for group in part.optimizer.param_groups for p in group["params"]]
        if type(part.optimizer) is torch.optim.AdamW and all(
            p.is_cuda and p.dtype == torch.float32 for p in parameters
        ):
            part.optimizer.__class__ = OnePassAdamW


def _make_state(optimizer: ChainedOptimizer) -> None:
    """Torch's AdamW has no state before its first step, and loading needs one to fill.

    A step at learning rate 0 (which also decays nothing) makes it; its count is taken back.
    """
    set_learning_rate(optimizer, 0.0)
    for part in optimizer.chained_optimizers:
        part._init_optimizer_states_with_dummy_values()
        for state in part.optimizer.state.values():
            state["step"].zero_()


def set_learning_rate(optimizer: ChainedOptimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def total_tokens(num_tokens: Tensor) -> int:
    """Trained tokens of the batch; a pipeline's last stage counts, context-parallel ranks alike.

    Args:
        num_tokens: [] int64, of this rank.
    """
    dist.all_reduce(num_tokens, group=mpu.get_data_parallel_group())
    return int(grid.from_last_stage(int(num_tokens)))


def update(optimizer: ChainedOptimizer, scale: float) -> tuple[float, bool]:
    """Clips and applies the reduced gradients times `scale`, unless they are not finite.

    Returns:
        Norm of the whole model's gradient before clipping, and whether the weights changed.
    """
    optimizer.prepare_grads()
    norm = scale * _gradient_norm(optimizer)
    if not math.isfinite(norm):
        return norm, False
    largest = optimizer.config.clip_grad
    if 0 < largest < norm:
        scale *= largest / (norm + 1e-6)
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, OnePassAdamW):
            part.optimizer.grad_scale = scale
        elif gradients := [p.grad for p in part.get_parameters() if p.grad is not None]:
            torch._foreach_mul_(gradients, scale)
    optimizer.step_with_ready_grads()
    return norm, True


def _gradient_norm(optimizer: ChainedOptimizer) -> float:
    """As Megatron's, which without Apex waits for the device once per parameter."""
    return math.sqrt(sum(_squared_norm(part) for part in optimizer.chained_optimizers))


def _squared_norm(part: MegatronOptimizer) -> float:
    """Over all ranks that hold a part of it."""
    gradients = part.get_main_grads_for_grad_norm()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        total += torch.stack(torch._foreach_norm(gradients)).double().square().sum()
    dist.all_reduce(total, group=part.get_grad_stats_parallel_group())
    return float(total)
