"""An optimizer section -> Megatron-core's DistributedDataParallelConfig and OptimizerConfig."""

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from relax_hpc.config.optimizer import OptimizerConfig
from relax_hpc.engines.megatron.passthrough import build, refusals
from relax_hpc.errors import ConfigError

FIRST_LOSS_SCALE = 2.0**10
"""Scale that float16 begins with, where losses are sums over tokens that weigh 1."""
_ALWAYS = "is always on; remove it"
_NO_EFFECT = "has no effect in this trainer; remove it"
_FSDP = "belongs to Megatron's FSDP, and this trainer shards the optimizer only; remove it"
_FP8 = "needs 8-bit weights, which this trainer does not have; remove it"

_DDP_REFUSED = (
    refusals(_ALWAYS, "use_distributed_optimizer")
    | refusals(
        "weights are published right after an update, so that their gathering has nothing to be "
        "overlapped with; remove it",
        "overlap_param_gather", "align_param_gather",
    )
    | refusals(
        "gradients are sums over tokens, divided once at the end; remove it",
        "average_in_collective",
    )
    | refusals(
        "an update is skipped and reported when its gradient is not finite; remove it",
        "check_for_nan_in_grad", "check_for_large_grads",
    )
    | refusals("is 1: all data-parallel ranks share the optimizer; remove it",
               "num_distributed_optimizer_instances")
    | refusals(
        _FSDP, "use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy",
        "outer_dp_sharding_strategy", "suggested_communication_unit_size", "preserve_fp32_weights",
        "fsdp_double_buffer", "fsdp_manual_registration", "gradient_reduce_div_fusion",
    )
    | refusals(_FP8, "fp8_param_gather", "keep_fp8_transpose_cache",
               "reuse_grad_buf_for_mxfp8_param_ag")
    | refusals("needs Transformer Engine's layers, which this trainer does not use; remove it",
               "delay_wgrad_compute")
)  # fmt: skip


def _set_by(key: str, *names: str) -> dict[str, str]:
    return refusals(f"is set by {key}; use that", *names)


_OPTIMIZER_REFUSED = (
    _set_by("actor.optimizer.lr", "lr")
    | _set_by("actor.optimizer.final_lr_fraction", "min_lr")
    | _set_by("actor.optimizer.weight_decay", "weight_decay")
    | _set_by("actor.optimizer.clip_grad", "clip_grad")
    | _set_by("model.dtype", "fp16", "bf16", "params_dtype")
    | _set_by(
        "actor.optimizer.moments", "exp_avg_dtype", "exp_avg_sq_dtype",
        "use_precision_aware_optimizer", "store_param_remainders",
    )
    | _set_by("actor.optimizer.ddp.grad_reduce_in_fp32", "main_grads_dtype")
    | refusals("main parameters are float32; remove it", "main_params_dtype")
    | _set_by(
        "actor.optimizer.offload", "optimizer_cpu_offload", "optimizer_offload_fraction",
        "use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d",
        "pin_cpu_grads", "pin_cpu_params",
    )
    | refusals(_ALWAYS, "use_distributed_optimizer", "decoupled_weight_decay")
    | refusals(
        "the optimizer is AdamW; remove it", "optimizer", "sgd_momentum", "muon_momentum",
        "muon_split_qkv", "muon_use_nesterov", "muon_scale_mode", "muon_fp32_matmul_prec",
        "muon_num_ns_steps", "muon_tp_mode", "muon_extra_scale_factor",
    )
    | refusals("one learning rate is for all parameters; remove it",
               "decoupled_lr", "decoupled_min_lr")
    | refusals(_DDP_REFUSED["overlap_param_gather"], "overlap_param_gather",
               "overlap_param_gather_with_optimizer_step")
    | refusals(_FP8, "fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag")
    | refusals(_NO_EFFECT, "timers", "log_num_zeros_in_grad", "barrier_with_L1_time",
               "config_logger_dir")
)  # fmt: skip


def ddp_config(config: OptimizerConfig, dtype: str) -> DistributedDataParallelConfig:
    """Gradient buffers and their reduction, with the job's own `actor.optimizer.ddp`.

    Raises:
        ConfigError: see `passthrough.build`; 16-bit sums of gradients in float16.
    """
    made = build(
        DistributedDataParallelConfig,
        "actor.optimizer.ddp",
        config.ddp,
        ours={"grad_reduce_in_fp32": True, "use_distributed_optimizer": True},
        refused=_DDP_REFUSED,
    )
    if dtype == "float16" and not made.grad_reduce_in_fp32:
        raise ConfigError(
            "actor.optimizer.ddp.grad_reduce_in_fp32 = False: float16 ends at 65504, and "
            'gradients are sums over tokens; remove it, or use model.dtype = "bfloat16"'
        )
    return made


def optimizer_config(config: OptimizerConfig, dtype: str) -> MegatronOptimizerConfig:
    """Makes Megatron's settings of optimizer and loss scale, with `actor.optimizer.megatron`.

    Raises:
        ConfigError: see `passthrough.build`; a decay of Adam's moments that is none.
    """
    made = build(
        MegatronOptimizerConfig,
        "actor.optimizer.megatron",
        config.megatron,
        ours={
            "optimizer": "adam",
            "lr": config.lr,
            "min_lr": 0.0,
            "weight_decay": config.weight_decay,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "clip_grad": config.clip_grad,
            "bf16": dtype == "bfloat16",
            "fp16": dtype == "float16",
            "params_dtype": getattr(torch, dtype),
            "use_distributed_optimizer": True,
            # Of float16. Every overflow costs a batch: begin low, and fall at once.
            "initial_loss_scale": FIRST_LOSS_SCALE,
            "loss_scale_window": 100,
            "hysteresis": 1,
        },
        refused=_OPTIMIZER_REFUSED,
    )
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(made, name) < 1:
            raise ConfigError(
                f"actor.optimizer.megatron.{name} = {getattr(made, name)}: use 0 or more, below 1"
            )
    return made


def check(config: OptimizerConfig, dtype: str) -> None:
    """Refuses what the trainer would, when it reads both tables.

    Raises:
        ConfigError: see `passthrough.build`.
    """
    ddp_config(config, dtype)
    optimizer_config(config, dtype)
