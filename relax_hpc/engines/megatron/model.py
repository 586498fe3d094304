"""A dense Qwen3 on stock Megatron-core: Hugging Face config in, GPTModel out."""

import difflib
import json
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor
from torch.nn import functional

from relax_hpc.config import ActorConfig, RunConfig
from relax_hpc.engines.megatron import gradient_fusion
from relax_hpc.engines.megatron.attention import Attend, PackedAttention
from relax_hpc.engines.megatron.layers import (
    FusedSelfAttention,
    PackedLayer,
    RMSNorm,
    RotaryByPosition,
    residual_add,
)
from relax_hpc.engines.megatron.logprobs import hidden_logprobs
from relax_hpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Architecture:
    """What config.json of a dense Qwen3 says."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope_base: float
    attention_bias: bool
    tied_embeddings: bool


def read_architecture(folder: Path) -> Architecture:
    """Reads config.json of a Hugging Face folder.

    Raises:
        ConfigError: no such file, or a model that is not a dense Qwen3 with plain rotary positions.
    """
    path = folder / "config.json"
    try:
        hf: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"model.path = {folder}: has no config.json") from None
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    for key, value, known in (
        ("model_type", hf.get("model_type"), "qwen3"),
        ("hidden_act", hf.get("hidden_act", "silu"), "silu"),
        ("rope type", rope_type, "default"),
        ("use_sliding_window", hf.get("use_sliding_window", False), False),
    ):
        if value != known:
            raise ConfigError(f"{path}: {key} = {value!r}: only {known!r} is supported")
    return Architecture(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        vocab_size=hf["vocab_size"],
        max_positions=hf["max_position_embeddings"],
        norm_epsilon=hf["rms_norm_eps"],
        rope_base=float(rope.get("rope_theta") or hf.get("rope_theta", 10000.0)),
        attention_bias=bool(hf.get("attention_bias", False)),
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


def transformer_config(config: RunConfig, shape: Architecture) -> TransformerConfig:
    """The model's shape, the parallel layout, then the job's own `actor.transformer` fields.

    Raises:
        ConfigError: an unknown field, one that is not the job's to set, or a value Megatron-core
            refuses; a tensor-parallel size that does not divide the model.
    """
    _check_divides(config.actor, shape)
    dtype = getattr(torch, config.model.dtype)
    ours: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.norm_epsilon,
        "add_qkv_bias": shape.attention_bias,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": config.actor.tensor_parallel,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
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
    ours |= _job_fields(config.actor, reserved=set(ours) - _OVERRIDABLE)
    try:
        return TransformerConfig(**ours)
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"actor.transformer = {config.actor.transformer}: Megatron-core refuses it: {error}"
        ) from error


_OVERRIDABLE = {"bias_activation_fusion", "bias_dropout_fusion"}


def _job_fields(actor: ActorConfig, *, reserved: set[str]) -> dict[str, Any]:
    known = {field.name for field in fields(TransformerConfig)}
    for name, value in actor.transformer.items():
        if name in reserved:
            raise ConfigError(
                f"actor.transformer.{name} = {value!r}: is set from the model and the layout; "
                "remove it"
            )
        if name not in known:
            close = difflib.get_close_matches(name, known - reserved, n=1, cutoff=0.0)
            raise ConfigError(
                f"actor.transformer.{name} = {value!r}: Megatron-core's TransformerConfig has no "
                f"such field; did you mean {close[0]}?"
            )
    return dict(actor.transformer)


def _check_divides(actor: ActorConfig, shape: Architecture) -> None:
    for what, size in (
        ("attention heads", shape.num_heads),
        ("key-value heads", shape.num_kv_heads),
        ("vocabulary entries", shape.vocab_size),
        ("feed-forward channels", shape.ffn_hidden_size),
    ):
        if size % actor.tensor_parallel:
            raise ConfigError(
                f"actor.tensor_parallel = {actor.tensor_parallel}: does not divide the model's "
                f"{size} {what}; use a divisor of it"
            )


class PackedGPT(GPTModel):  # type: ignore[misc]
    """Megatron's, but its last stage gives hidden states: `logprobs` makes of them what it can."""

    def _postprocess(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states

    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        temperature: float,
        float32_logits: bool = False,
        kept_gib: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """[T] logprobs of `targets`, with gradient, and [T] entropy, without; T of this rank.

        Args:
            hidden: [T, 1, h], or this rank's part of T under sequence parallelism.
            float32_logits: and `kept_gib`, see `logprobs.hidden_logprobs`.
        """
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        return hidden_logprobs(
            hidden.squeeze(1), weight, targets, temperature=temperature, group=group,
            float32_logits=float32_logits, kept_gib=kept_gib,
        )  # fmt: skip


def build(
    config: TransformerConfig, shape: Architecture, device: torch.device, attend: Attend
) -> PackedGPT:
    """Builds this rank's part, weights uninitialised. Model-parallel groups must exist."""
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    layer.module = PackedLayer
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = residual_add
    layer.submodules.self_attention.module = FusedSelfAttention
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = partial(PackedAttention, attend=attend)
    num_layers = get_num_layers_to_build(config, vp_stage=None)
    model = PackedGPT(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer] * num_layers, layer_norm=RMSNorm
        ),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="mrope",
    )
    model.rotary_pos_emb = RotaryByPosition(shape.head_dim, shape.rope_base, device)
    return cast(PackedGPT, model.to(device))
