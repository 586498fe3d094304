"""Llama 2 and 3, and models of their form (SmolLM2, distillations into Llama, Mistral).

They are Qwen3 without norms of queries and keys. Mistral's layers may have a sliding window. Qwen2
and Qwen2.5 have biases of queries, keys and values.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from relax_hpc.config.hf_config import ConfigJson, Table
from relax_hpc.trainer.models import qwen3
from relax_hpc.trainer.models.architecture import Architecture, Family
from relax_hpc.trainer.models.names import Parameter

_NORMS = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
_MAY_BE_NULL = ("head_dim", "num_key_value_heads")


def read(config: ConfigJson) -> Architecture:
    """Reads config.json; by default there are as many key-value heads as query heads."""
    said = {
        key: value
        for key, value in config.record.items()
        if value is not None or key not in _MAY_BE_NULL
    }
    heads = {"num_key_value_heads": config.get("num_attention_heads")}
    return qwen3.read_shape(Table(heads | said, config.place))


def transformer(shape: Architecture) -> dict[str, Any]:
    return qwen3.transformer(shape) | {"qk_layernorm": False}


def parameters(shape: Architecture) -> Iterator[Parameter]:
    return qwen3.model(shape, lambda _: (*attention(shape), *qwen3.dense_mlp(shape)))


def attention(shape: Architecture) -> Iterator[Parameter]:
    for parameter in qwen3.attention(shape):
        if parameter.core[0] not in _NORMS:
            yield parameter


FAMILY = Family("llama", "LlamaForCausalLM", read, transformer, parameters)


_WINDOW = 4096
"""Attention window, if config.json has none; null means unlimited."""


def read_mistral(config: ConfigJson) -> Architecture:
    """Reads config.json; texts may be as long as the window, within which every token sees all."""
    shape = read(config)
    if "sliding_window" in config.record and config.get("sliding_window") is None:
        return shape
    window = config.size("sliding_window", _WINDOW)
    if window >= shape.max_positions:
        return shape
    return replace(shape, max_positions=window, is_window=True)


MISTRAL = Family("mistral", "MistralForCausalLM", read_mistral, transformer, parameters)


def _transformer_qwen2(shape: Architecture) -> dict[str, Any]:
    return transformer(shape) | {"add_qkv_bias": True}


def _parameters_qwen2(shape: Architecture) -> Iterator[Parameter]:
    return qwen3.model(shape, lambda _: (*_attention_qwen2(shape), *qwen3.dense_mlp(shape)))


def _attention_qwen2(shape: Architecture) -> Iterator[Parameter]:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield from attention(shape)
    yield Parameter(
        ("self_attention.linear_qkv.bias",),
        {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        },
        "rows",
        groups=shape.num_kv_heads,
    )


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", qwen3.read_shape, _transformer_qwen2, _parameters_qwen2)
