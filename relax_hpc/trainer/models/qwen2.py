"""Qwen2 and Qwen2.5, dense: Llama with biases of queries, keys and values."""

from collections.abc import Iterator
from typing import Any

from relax_hpc.trainer.models import llama, qwen3
from relax_hpc.trainer.models.architecture import Architecture, Family
from relax_hpc.trainer.models.names import Parameter


def transformer(shape: Architecture) -> dict[str, Any]:
    return llama.transformer(shape) | {"add_qkv_bias": True}


def parameters(shape: Architecture) -> Iterator[Parameter]:
    return qwen3.model(shape, lambda _: (*_attention(shape), *qwen3.dense_mlp(shape)))


def _attention(shape: Architecture) -> Iterator[Parameter]:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield from llama.attention(shape)
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


FAMILY = Family("qwen2", "Qwen2ForCausalLM", qwen3.read_shape, transformer, parameters)
