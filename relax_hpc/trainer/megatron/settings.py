"""Converts a model and the tables of a job to Megatron-core's configs, and checks them with its
classes.

It also lists which fields act here, and why a job cannot set the others. No layer here is
Transformer Engine's, and attention, norms, activations, embedding, logits, router and experts are
our own, so none of them reads most fields.
"""

import difflib
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from torch.nn import functional

from relax_hpc.config.model import Layout, MegatronConfig, OptimizerConfig
from relax_hpc.errors import ConfigError
from relax_hpc.trainer.megatron import fit
from relax_hpc.trainer.megatron.layers import gradient_fusion, router
from relax_hpc.trainer.models.architecture import Architecture
from relax_hpc.trainer.models.registry import FAMILIES

Made = TypeVar("Made")

_PLAIN = (bool, int, float, str)


def refusals(reason: str, *names: str) -> dict[str, str]:
    """Returns the same reason for all names, as `pass_through` takes it."""
    return dict.fromkeys(names, reason)


def pass_through(
    target: type[Made],
    key: str,
    table: Mapping[str, Any],
    *,
    ours: Mapping[str, Any],
    refused: Mapping[str, str],
) -> Made:
    """Builds `target` from our values, overridden by the job's.

    Args:
        key: of the table in the job, for messages.
        ours: field -> value.
        refused: field -> why a job cannot set it, and a remedy.

    Raises:
        ConfigError: a field is unknown or refused, or its value is of the wrong type or refused by
            `target`.
    """
    hints = get_type_hints(target)
    known = {field.name for field in fields(target)}  # type: ignore[arg-type]
    for name, value in table.items():
        if name in refused:
            raise ConfigError(f"{key}.{name} = {value!r}: {refused[name]}")
        if name not in known:
            nearest = _nearest(name, known - set(refused))
            raise ConfigError(
                f"{key}.{name} = {value!r}: Megatron-core's {target.__name__} has no such field; "
                f"did you mean {nearest}?"
            )
        if not _fits(value, hints[name]):
            raise ConfigError(f"{key}.{name} = {value!r}: {_describe_expected(hints[name])}")
    try:
        return target(**{**ours, **table})
    except (ValueError, AssertionError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{key} = {dict(table)}: Megatron-core refuses it: {reason}") from error


def _nearest(name: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]


def _alternatives(hint: Any) -> list[Any]:  # noqa: ANN401
    if get_origin(hint) in (Union, types.UnionType):
        return [part for one in get_args(hint) for part in _alternatives(one)]
    return [] if hint is type(None) else [hint]


def _fits(value: Any, hint: Any) -> bool:  # noqa: ANN401
    return any(_is(value, kind) for kind in _alternatives(hint))


def _is(value: Any, kind: Any) -> bool:  # noqa: ANN401
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list or kind is list:
        (inner,) = get_args(kind) or (Any,)
        return isinstance(value, list) and all(_fits(one, inner) for one in value)
    if kind is Any:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind in _PLAIN and isinstance(value, kind)


def _describe_expected(hint: Any) -> str:  # noqa: ANN401
    spelled = [text for kind in _alternatives(hint) if (text := _spelling(kind))]
    if not spelled:
        return "no value that a job can write fits this field; remove it"
    return f"is not {' or '.join(spelled)}"


def _spelling(kind: Any) -> str:  # noqa: ANN401
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is list or kind is list:
        return "a list"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    return names.get(kind, "")


OBEYED = frozenset(
    (
        "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split", "overlap_p2p_comm_warmup_flush",
        "clone_scatter_output_in_embedding", "disable_bf16_reduced_precision_matmul",
    )
)  # fmt: skip
OBEYED_BY_EXPERTS = frozenset(
    (
        "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
        "moe_router_score_function", "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias",
        "moe_router_bias_update_rate", "moe_router_force_load_balancing",
        "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_deepep_num_sms",
        "moe_hybridep_num_sms",
    )
)  # fmt: skip
"""Unused by a model without experts."""

_BY_MODEL = "is decided by the model in model.path; remove it"
_NEEDS_TE = "needs Transformer Engine's layers, which this trainer does not use; remove it"
_NO_EFFECT = "has no effect in this trainer; remove it"
_NO_GRAPHS = "CUDA graphs need micro-batches of one length, and lengths vary here; remove it"
_WEIGHTS_READ = "weights are read from model.path, so nobody draws them; remove it"
_NO_SERVING = "is for inference with Megatron-core, and engines sample here; remove it"
_NO_DROPPING = "every token goes to all experts that were chosen; remove it"
_NO_KITCHEN = "needs the package kitchen, which this trainer does not use; remove it"
_OWN_LOGPROBS = "the trainer has a product for logprobs of its own; remove it"
_IN_MODULES = 'use recompute_modules = ["moe"] with recompute_granularity = "selective"'

REASONS = (
    refusals(
        _BY_MODEL, "softmax_type", "window_size", "window_attn_skip_freq", "qk_l2_norm",
        "attention_output_gate", "no_rope_freq", "rotary_interleaved", "glu_linear_offset",
        "activation_func_clamp_value", "layernorm_zero_centered_gamma",
        "apply_residual_connection_post_layernorm", "multi_latent_attention",
        "experimental_attention_variant", "dsa_indexer_n_heads", "dsa_indexer_head_dim",
        "dsa_indexer_topk", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss",
        "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim",
        "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
        "mtp_num_layers", "mtp_loss_scaling_factor", "mtp_standalone", "is_hybrid_model",
        "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads",
        "use_mamba_mem_eff_path", "heterogeneous_block_specs", "hetereogenous_dist_checkpoint",
        "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
        "moe_shared_expert_overlap", "moe_latent_size", "use_fused_weighted_squared_relu",
    )
    | refusals(
        _NEEDS_TE, "fp8", "fp8_recipe", "fp8_param", "fp8_quantizer_factory", "fp8_margin",
        "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad",
        "fp8_dot_product_attention", "fp8_multi_head_attention", "tp_only_amax_red",
        "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
        "activation_func_fp8_input_store", "fp4", "fp4_recipe", "fp4_param",
        "fp4_quantizer_factory", "quant_recipe", "tp_comm_overlap", "tp_comm_bulk_wgrad",
        "tp_comm_bulk_dgrad", "tp_comm_overlap_ag", "tp_comm_overlap_rs",
        "tp_comm_overlap_rs_dgrad", "tp_comm_split_ag", "tp_comm_atomic_ag", "tp_comm_split_rs",
        "tp_comm_atomic_rs", "tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1",
        "tp_comm_bootstrap_backend", "use_te_rng_tracker", "use_te_activation_func",
        "delay_wgrad_compute", "symmetric_ar_type", "disable_parameter_transpose_cache",
        "cpu_offloading", "cpu_offloading_num_layers", "cpu_offloading_activations",
        "cpu_offloading_weights", "cpu_offloading_double_buffering",
        "fine_grained_activation_offloading", "offload_modules", "min_offloaded_tensor_size",
        "moe_permute_fusion", "moe_router_padding_for_quantization", "moe_router_padding_for_fp8",
        "moe_router_fusion", "fused_single_qkv_rope", "transformer_impl",
        "init_model_with_meta_device",
    )
    | refusals(
        _NO_GRAPHS, "enable_cuda_graph", "cuda_graph_use_single_mempool",
        "cuda_graph_retain_backward_graph", "cuda_graph_warmup_steps", "external_cuda_graph",
        "cuda_graph_impl", "cuda_graph_scope",
    )
    | refusals(_NO_KITCHEN, "use_kitchen", "use_kitchen_attention", "kitchen_attention_backend")
    | refusals(
        _WEIGHTS_READ, "init_method", "output_layer_init_method", "init_method_std",
        "embedding_init_method", "embedding_init_method_std",
    )
    | refusals(
        _NO_SERVING, "flash_decode", "batch_invariant_mode", "inference_rng_tracker",
        "inference_sampling_seed", "use_inference_optimized_layers",
        "inference_fuse_tp_communication", "mlp_chunks_for_prefill",
    )
    | refusals(
        _NO_DROPPING, "moe_token_dropping", "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity", "moe_token_drop_policy",
    )
    | refusals(_OWN_LOGPROBS, "cross_entropy_loss_fusion", "cross_entropy_fusion_impl",
               "defer_embedding_wgrad_compute", "wgrad_deferral_limit")
    | refusals(
        "is not supported here; remove it", "moe_input_jitter_eps", "moe_apply_probs_on_input",
        "fp32_residual_connection", "enable_autocast", "autocast_dtype", "hybrid_context_parallel",
        "max_seqlen_per_dp_cp_rank", "hierarchical_context_parallel_sizes",
        "overlap_moe_expert_parallel_comm", "ep_overlap_early_attn_memory_release",
        "use_ring_exchange_p2p", "qk_clip", "qk_clip_alpha", "qk_clip_threshold",
        "num_microbatches_with_partial_activation_checkpoints",
    )
    | refusals("the router's logits are float32; remove it", "moe_router_dtype")
    | refusals("is rollout.advanced.routed_experts; use that", "moe_enable_routing_replay")
    | refusals("experts have one kernel here, and it is ours; remove it",
               "moe_use_legacy_grouped_gemm")
    | refusals('use moe_flex_dispatcher_backend = "deepep"', "moe_enable_deepep")
    | refusals(_IN_MODULES, "moe_layer_recompute")
    | refusals("use moe_router_num_groups and moe_router_group_topk",
               "moe_router_topk_limited_devices")
    | refusals("is the number of pipeline stages, of which micro-batches are a multiple; remove it",
               "microbatch_group_size_per_vp_stage")
    | refusals(
        "ranks of tensor parallelism share the tokens between matrices, so nothing is left to "
        "distribute; remove it", "distribute_saved_activations",
    )
    | refusals(
        "is set by the trainer; remove it", "timers", "finalize_model_grads_func",
        "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func",
        "_cpu_offloading_context",
    )
    | refusals(
        _NO_EFFECT, "pipeline_model_parallel_comm_backend", "moe_extended_tp",
        "async_tensor_model_parallel_allreduce", "batch_p2p_sync", "barrier_with_L1_time",
        "deterministic_mode", "log_max_attention_logit", "test_mode",
        "apply_query_key_layer_scaling", "attention_softmax_in_fp32", "memory_efficient_layer_norm",
        "moe_per_layer_logging", "cp_comm_type", "config_logger_dir",
    )
)  # fmt: skip
"""Field -> why a job cannot set it, and a remedy. Fields that the trainer sets are not here."""


def _set_by(key: str, *names: str) -> dict[str, str]:
    return refusals(f"is set by {key}; use that", *names)


_BY_KEY = (
    _set_by("actor.layout.tensor_parallel", "tensor_model_parallel_size", "sequence_parallel")
    | _set_by("actor.layout.pipeline_parallel", "pipeline_model_parallel_size")
    | _set_by("actor.layout.virtual_pipeline", "virtual_pipeline_model_parallel_size")
    | _set_by("actor.layout.context_parallel", "context_parallel_size")
    | _set_by("actor.layout.expert_parallel", "expert_model_parallel_size")
    | _set_by("actor.layout.expert_tensor_parallel", "expert_tensor_parallel_size")
    | _set_by("actor.advanced.attention", "attention_backend")
    | _set_by("model.dtype", "params_dtype", "pipeline_dtype", "bf16", "fp16")
)
_NEEDS_RANKS = {
    "num_layers_in_first_pipeline_stage": "pipeline_parallel",
    "num_layers_in_last_pipeline_stage": "pipeline_parallel",
    "pipeline_model_parallel_layout": "pipeline_parallel",
    "account_for_embedding_in_pipeline_split": "pipeline_parallel",
    "account_for_loss_in_pipeline_split": "pipeline_parallel",
    "overlap_p2p_comm_warmup_flush": "virtual_pipeline",
    "clone_scatter_output_in_embedding": "tensor_parallel",
}
"""Field -> key of the layout without which it has no effect."""


class _Need(NamedTuple):
    """Another field without which one has no effect."""

    holds: Callable[[TransformerConfig], bool]
    text: str


_FULL = _Need(lambda made: made.recompute_granularity == "full", 'recompute_granularity = "full"')
_FLEX = _Need(
    lambda made: made.moe_token_dispatcher_type == "flex", 'moe_token_dispatcher_type = "flex"'
)
_NEEDS = {
    "recompute_method": _FULL,
    "recompute_num_layers": _FULL,
    "recompute_modules": _Need(
        lambda made: made.recompute_granularity == "selective",
        'recompute_granularity = "selective"',
    ),
    "moe_router_load_balancing_type": _Need(
        lambda made: bool(made.moe_aux_loss_coeff), "moe_aux_loss_coeff"
    ),
    "moe_aux_loss_coeff": _Need(
        lambda made: made.moe_router_load_balancing_type != "none",
        'moe_router_load_balancing_type, e.g. "aux_loss"',
    ),
    "moe_router_num_groups": _Need(
        lambda made: made.moe_router_group_topk is not None, "moe_router_group_topk"
    ),
    "moe_router_bias_update_rate": _Need(
        lambda made: made.moe_router_enable_expert_bias, "moe_router_enable_expert_bias = true"
    ),
    "moe_flex_dispatcher_backend": _FLEX,
    "moe_deepep_num_sms": _FLEX,
    "moe_hybridep_num_sms": _FLEX,
}


def list_refused(ours: Mapping[str, Any], layout: Layout, model_type: str) -> dict[str, str]:
    """Returns field -> why a job cannot set it, as `pass_through` takes it."""
    said = refusals(_NO_EFFECT, *(field.name for field in fields(TransformerConfig)))
    said |= refusals("is set from the model and the layout; remove it", *ours) | REASONS | _BY_KEY
    taken = OBEYED
    if ours.get("num_moe_experts") is None:
        without = f"a model of model_type {model_type!r} has no experts; remove it"
        said |= refusals(without, *(name for name in said if name.startswith("moe_")))
    else:
        taken |= OBEYED_BY_EXPERTS
    said = {name: why for name, why in said.items() if name not in taken}
    only = "has an effect only with {}; set that, or remove this"
    for name, key in _NEEDS_RANKS.items():
        if getattr(layout, key) == 1:
            said[name] = only.format(f"actor.layout.{key} > 1")
    if not ours["bf16"]:
        said["disable_bf16_reduced_precision_matmul"] = only.format('model.dtype = "bfloat16"')
    return said


def check_needs(made: TransformerConfig, table: Mapping[str, Any]) -> None:
    """Checks that fields which depend on others have them.

    Raises:
        ConfigError: has the field and its requirement.
    """
    for name, value in table.items():
        need = _NEEDS.get(name)
        if need is not None and value not in (0, "none") and not need.holds(made):
            raise ConfigError(
                f"actor.transformer.{name} = {value!r}: has an effect only with "
                f"actor.transformer.{need.text}; set that, or remove this"
            )
    if made.recompute_granularity == "selective":
        _check_modules(made, table.get("recompute_modules", []))


def _check_modules(made: TransformerConfig, modules: Sequence[str]) -> None:
    """Checks for modules that are recomputed anyway, cannot be, or do not exist in the model."""
    has_experts = made.num_moe_experts is not None
    able = [*["mlp"] * (not has_experts or made.moe_layer_freq != 1), *["moe"] * has_experts]
    if modules and not set(modules) - set(able):
        return
    why = [f"{module} ({_MODULES[module]})" for module in modules if module in _MODULES]
    raise ConfigError(
        f"actor.transformer.recompute_modules = {list(modules)}: "
        f"{', '.join(why) + '; ' if why else ''}use {' or '.join(map(repr, able))}, which this "
        "model has"
    )


_MODULES = {
    "core_attn": "attention keeps no scores",
    "layernorm": "actor.advanced.recomputed_passes does that",
    "moe_act": "is always on",
}
"""Modules of Megatron's that mean something else here."""


def transformer_config(
    config: MegatronConfig, shape: Architecture, dtype: str
) -> TransformerConfig:
    """Combines the model's shape, the layout, and the job's own `transformer` fields.

    Raises:
        ConfigError: an unknown field, one that the job may not set, or a value Megatron-core
            refuses; a layout that does not divide the model; a first stage with too few layers for
            features of media.
    """
    fit.check(config, shape)
    layout = config.layout
    params_dtype = getattr(torch, dtype)
    ours: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        # Queries and keys that the rotation makes longer, both of them, are products that are.
        "softmax_scale": shape.rope.attention_factor**2 / math.sqrt(shape.head_dim),
        "layernorm_epsilon": shape.norm_epsilon,
        "activation_func": functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": params_dtype,
        "pipeline_dtype": params_dtype,
        "bf16": params_dtype is torch.bfloat16,
        "fp16": params_dtype is torch.float16,
        "tensor_model_parallel_size": layout.tensor_parallel,
        "sequence_parallel": layout.is_sequence_parallel,
        "pipeline_model_parallel_size": layout.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": (
            layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
        ),
        "context_parallel_size": layout.context_parallel,
        "expert_model_parallel_size": layout.expert_parallel,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel,
        # Every micro-batch has a length of its own, and outputs are views.
        "variable_seq_lengths": layout.pipeline_parallel > 1,
        "deallocate_pipeline_outputs": False,
        "batch_p2p_comm": False,
        "overlap_p2p_comm": layout.virtual_pipeline > 1,
        # Random weights are overwritten, but drawing them also marks which ones ranks share:
        # without the marks the gradient norm misses all ranks but the first.
        "perform_initialization": True,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # The loss divides by the tokens of the global batch, so gradients must only be added up.
        "calculate_per_token_loss": True,
        # Any value: the only positions Megatron hands to a rotary module are multimodal ones.
        "mrope_section": [shape.head_dim // 2],
        "gradient_accumulation_fusion": gradient_fusion.install(),
        # These need Transformer Engine or Apex.
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
    }
    family = FAMILIES[shape.model_type]
    ours |= family.transformer(shape)
    without_effect, table = list_refused(ours, layout, shape.model_type), config.transformer
    if not config.owns_transformer:  # the actor's model or layout may be another
        table = {name: value for name, value in table.items() if name not in without_effect}
    # Dense models are asked, too: the default refuses lengths that vary.
    ours["moe_token_dispatcher_type"] = "alltoall"
    made = pass_through(
        TransformerConfig,
        "actor.transformer",
        table,
        ours={**ours, **family.defaults},
        refused=without_effect,
    )
    router.check(made)
    if config.owns_transformer:
        check_needs(made, table)
    _check_first_chunk(made, config, shape)
    return made


def _check_first_chunk(
    made: TransformerConfig, config: MegatronConfig, shape: Architecture
) -> None:
    """Checks that the first layers, which get features of media, are on the encoders' stage.

    For even stages `fit.check` does it.
    """
    if shape.vision is None:
        return
    layout, taps = made.pipeline_model_parallel_layout, len(shape.vision.taps)
    if isinstance(layout, PipelineParallelLayerLayout):
        layers = layout.get_num_layers_to_build(vp_stage=0, pp_rank=0)
    else:
        layers = get_num_layers_to_build(made, vp_stage=0, pp_rank=0)
    if layers < taps:
        raise ConfigError(
            f"{config.section}.transformer: leaves {layers} layers to the first chunk of the first "
            f"pipeline stage, and features of images go into the model's first {taps}; give it "
            f"{taps} at least"
        )


FIRST_LOSS_SCALE = 2.0**10
"""Initial scale of float16 if losses are sums over tokens of weight 1."""
_LOSS_SCALE = (
    "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"
)  # fmt: skip
_ALWAYS = "is always on; remove it"
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
    | refusals(_NEEDS_TE,
               "delay_wgrad_compute")
)  # fmt: skip


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
    """Sets gradient buffers and their reduction, with the job's own `actor.optimizer.ddp`.

    Raises:
        ConfigError: see `pass_through`; 16-bit gradient sums in float16; buckets without
            overlap.
    """
    made = pass_through(
        DistributedDataParallelConfig,
        "actor.optimizer.ddp",
        config.ddp,
        ours={"grad_reduce_in_fp32": True, "use_distributed_optimizer": True},
        refused=_DDP_REFUSED,
    )
    if "bucket_size" in config.ddp and not made.overlap_grad_reduce:
        raise ConfigError(
            f"actor.optimizer.ddp.bucket_size = {made.bucket_size}: has an effect only with "
            "actor.optimizer.ddp.overlap_grad_reduce = true; set that, or remove this"
        )
    if dtype == "float16" and not made.grad_reduce_in_fp32:
        raise ConfigError(
            "actor.optimizer.ddp.grad_reduce_in_fp32 = False: float16 ends at 65504, and "
            'gradients are sums over tokens; remove it, or use model.dtype = "bfloat16"'
        )
    return made


def optimizer_config(config: OptimizerConfig, dtype: str) -> MegatronOptimizerConfig:
    """Sets optimizer and loss scale, with `actor.optimizer.megatron`.

    Raises:
        ConfigError: see `pass_through`; an invalid decay of Adam's moments; a loss scale
            without float16.
    """
    made = pass_through(
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
    for name in _LOSS_SCALE if dtype != "float16" else ():
        if name in config.megatron:
            raise ConfigError(
                f"actor.optimizer.megatron.{name} = {config.megatron[name]}: has an effect only "
                'with model.dtype = "float16"; remove it'
            )
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(made, name) < 1:
            raise ConfigError(
                f"actor.optimizer.megatron.{name} = {getattr(made, name)}: use 0 or more, below 1"
            )
    return made


def check_optimizer(config: OptimizerConfig, dtype: str) -> None:
    """Checks both tables as the trainer would.

    Raises:
        ConfigError: see `pass_through`.
    """
    ddp_config(config, dtype)
    optimizer_config(config, dtype)
