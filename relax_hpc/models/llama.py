"""Llama 2 and 3, and what has their form (SmolLM2, distillations into Llama): Qwen3 without norms
of queries and keys."""

from collections.abc import Iterator
from typing import Any

from relax_hpc.models import qwen3
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.config_json import ConfigJson, Table
from relax_hpc.models.family import Family
from relax_hpc.models.names import Parameter

_NORMS = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
_MAY_BE_NULL = ("head_dim", "num_key_value_heads")


def read(config: ConfigJson) -> Architecture:
    """Reads the file; without a number of key-value heads there is one for each query head."""
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


FAMILY = Family("llama", read, transformer, qwen3.defaults, parameters)
