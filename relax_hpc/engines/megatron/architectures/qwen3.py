"""Qwen3, dense."""

from typing import Any

from relax_hpc.engines.megatron.architecture import Architecture
from relax_hpc.engines.megatron.architectures.config_json import ConfigJson
from relax_hpc.engines.megatron.architectures.family import Family


def read(config: ConfigJson) -> Architecture:
    config.require("hidden_act", "silu")
    config.require("use_sliding_window", False)
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    return Architecture(
        model_type=config.get("model_type"),
        num_layers=config.size("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=config.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads"),
        head_dim=config.size("head_dim") if config.get("head_dim") else hidden_size // num_heads,
        vocab_size=config.size("vocab_size"),
        max_positions=config.size("max_position_embeddings"),
        norm_epsilon=config.number("rms_norm_eps"),
        rope_base=config.rope_base(),
        attention_bias=config.flag("attention_bias"),
        tied_embeddings=config.flag("tie_word_embeddings"),
    )


def transformer(shape: Architecture) -> dict[str, Any]:
    return {
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": shape.attention_bias,
    }


def defaults(_: Architecture) -> dict[str, Any]:
    return {}


FAMILY = Family("qwen3", read, transformer, defaults)
