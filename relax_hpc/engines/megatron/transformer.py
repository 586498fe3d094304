"""Actor or reference, and model -> Megatron-core's TransformerConfig."""

import math
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from torch.nn import functional

from relax_hpc.config.layout import MegatronConfig
from relax_hpc.engines.megatron import fit
from relax_hpc.engines.megatron.layers import gradient_fusion
from relax_hpc.engines.megatron.moe import expert_layer
from relax_hpc.engines.megatron.passthrough import build, refusals
from relax_hpc.errors import ConfigError
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.registry import FAMILIES


def transformer_config(
    config: MegatronConfig, shape: Architecture, dtype: str
) -> TransformerConfig:
    """Takes the model's shape, the layout, then the job's own `transformer` fields.

    Args:
        dtype: of the weights, a name of torch's.

    Raises:
        ConfigError: an unknown field, one that is not the job's to set, or a value Megatron-core
            refuses; a layout that does not divide the model; stages whose first has too few layers
            for features of media.
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
    refused = refusals(_REASON, *(set(ours) - _OVERRIDABLE)) | _SET_BY
    # Dense models are asked, too: the default refuses lengths that vary.
    ours["moe_token_dispatcher_type"] = "alltoall"
    made = build(
        TransformerConfig,
        "actor.transformer",
        config.transformer,
        ours=ours | family.defaults(shape),
        refused=refused,
    )
    expert_layer.check(made)
    _check_first_chunk(made, config, shape)
    return made


def _check_first_chunk(
    made: TransformerConfig, config: MegatronConfig, shape: Architecture
) -> None:
    """Features of media go into the first layers; those have to be where the towers are.

    Of even stages `fit.check` says it.
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


_OVERRIDABLE = {"bias_activation_fusion", "bias_dropout_fusion"}
_REASON = "is set from the model and the layout; remove it"
_SET_BY = {
    name: f"is set by {key}; use that"
    for name, key in {
        "tensor_model_parallel_size": "actor.layout.tensor_parallel",
        "pipeline_model_parallel_size": "actor.layout.pipeline_parallel",
        "virtual_pipeline_model_parallel_size": "actor.layout.virtual_pipeline",
        "context_parallel_size": "actor.layout.context_parallel",
        "expert_model_parallel_size": "actor.layout.expert_parallel",
        "expert_tensor_parallel_size": "actor.layout.expert_tensor_parallel",
        "sequence_parallel": "actor.layout.tensor_parallel",
        "params_dtype": "model.dtype",
        "pipeline_dtype": "model.dtype",
        "bf16": "model.dtype",
        "fp16": "model.dtype",
    }.items()
}
