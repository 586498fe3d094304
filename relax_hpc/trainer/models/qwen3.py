"""Qwen3, dense."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from relax_hpc.config.hf_config import ConfigJson, Table
from relax_hpc.trainer.models.architecture import Architecture, Family
from relax_hpc.trainer.models.fields import QWEN3_HEAD_DIM
from relax_hpc.trainer.models.names import Parameter
from relax_hpc.trainer.models.rope import DEFAULT_BASE, Rope


def read(config: ConfigJson) -> Architecture:
    return read_shape(config, QWEN3_HEAD_DIM)


def read_shape(
    config: Table,
    head_dim: int | None = None,
    *,
    sees: bool = False,
    rope_base: float = DEFAULT_BASE,
) -> Architecture:
    """Reads the fields that these families have in common.

    Args:
        config: of the model, or its part about language.
        head_dim: default; without it, the hidden channels divided by the heads.
        sees: whether positions are in time, y and x.
        rope_base: default.
    """
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = config.size("head_dim", head_dim or hidden_size // num_heads)
    return Architecture(
        model_type=config.get("model_type"),
        num_layers=config.size("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=config.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads"),
        head_dim=head_dim,
        vocab_size=config.size("vocab_size"),
        max_positions=config.size("max_position_embeddings"),
        norm_epsilon=config.number("rms_norm_eps"),
        rope=Rope.read(config, head_dim=head_dim if sees else None, base=rope_base),
        tied_embeddings=config.flag("tie_word_embeddings"),
    )


def transformer(_: Architecture) -> dict[str, Any]:
    return {
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
    }


def parameters(shape: Architecture) -> Iterator[Parameter]:
    return model(shape, lambda _: (*attention(shape), *dense_mlp(shape)))


def model(shape: Architecture, layer: Callable[[int], Iterable[Parameter]]) -> Iterator[Parameter]:
    """Yields the parameters of a model whose layers are between an embedding and a norm.

    Args:
        layer: returns the parameters of a layer.
    """
    table = {"model.embed_tokens.weight": (shape.vocab_size, shape.hidden_size)}
    output = "output_layer.weight"
    # A tied output layer that is on another pipeline stage than the embedding has a copy of it.
    copies = (output,) if shape.tied_embeddings else ()
    yield Parameter(("embedding.word_embeddings.weight", *copies), table, "rows")
    for number in range(shape.num_layers):
        for parameter in layer(number):
            yield parameter.within(f"decoder.layers.{number}.", f"model.layers.{number}.")
    yield Parameter(
        ("decoder.final_layernorm.weight",), {"model.norm.weight": (shape.hidden_size,)}
    )
    if not shape.tied_embeddings:
        table = {"lm_head.weight": (shape.vocab_size, shape.hidden_size)}
        yield Parameter((output,), table, "rows")


def attention(shape: Architecture) -> Iterator[Parameter]:
    hidden, head = shape.hidden_size, shape.head_dim
    queries, keys = shape.num_heads * head, shape.num_kv_heads * head
    yield Parameter(("input_layernorm.weight",), {"input_layernorm.weight": (hidden,)})
    yield Parameter(
        ("self_attention.linear_qkv.weight",),
        {
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
        },
        "rows",
        groups=shape.num_kv_heads,
    )
    yield Parameter(("self_attention.q_layernorm.weight",), {"self_attn.q_norm.weight": (head,)})
    yield Parameter(("self_attention.k_layernorm.weight",), {"self_attn.k_norm.weight": (head,)})
    yield Parameter(
        ("self_attention.linear_proj.weight",),
        {"self_attn.o_proj.weight": (hidden, queries)},
        "columns",
    )
    yield Parameter(("pre_mlp_layernorm.weight",), {"post_attention_layernorm.weight": (hidden,)})


def dense_mlp(shape: Architecture) -> Iterator[Parameter]:
    hidden, channels = shape.hidden_size, shape.ffn_hidden_size
    yield Parameter(
        ("mlp.linear_fc1.weight",),
        {"mlp.gate_proj.weight": (channels, hidden), "mlp.up_proj.weight": (channels, hidden)},
        "gate_up",
    )
    yield Parameter(
        ("mlp.linear_fc2.weight",), {"mlp.down_proj.weight": (hidden, channels)}, "columns"
    )


FAMILY = Family("qwen3", "Qwen3ForCausalLM", read, transformer, parameters)
