"""Qwen3-MoE: Qwen3 with a mixture of experts in most layers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from relax_hpc.config.hf_config import ConfigJson, Table
from relax_hpc.errors import ConfigError
from relax_hpc.trainer.models import qwen3
from relax_hpc.trainer.models.architecture import Architecture, Family, MoeArchitecture
from relax_hpc.trainer.models.names import Parameter


def read(config: ConfigJson) -> Architecture:
    dense = qwen3.read_shape(config)
    return replace(dense, experts=read_experts(config, dense.num_layers))


def read_experts(config: Table, num_layers: int) -> MoeArchitecture:
    """Reads the fields of a mixture of experts.

    Raises:
        ConfigError: naming the key.
    """
    # The hub's folders have the first, transformers 5 writes the second.
    key = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    num_experts, chosen = config.size(key), config.size("num_experts_per_tok")
    if chosen > num_experts:
        raise ConfigError(
            f"{config.place}num_experts_per_tok = {chosen}: there are {key} = {num_experts}"
        )
    return MoeArchitecture(
        num_experts=num_experts,
        experts_per_token=chosen,
        ffn_hidden_size=config.size("moe_intermediate_size"),
        norm_topk_prob=config.flag("norm_topk_prob"),
        layers=_layers(config, num_layers),
    )


def _layers(config: Table, num_layers: int) -> tuple[int, ...]:
    every = config.size("decoder_sparse_step", 1)
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        raise config.make_error("mlp_only_layers", "a list of layers is expected")
    dense = set(listed)
    layers = tuple(n for n in range(num_layers) if n not in dense and (n + 1) % every == 0)
    if not layers:
        raise ConfigError(
            f"{config.place}mlp_only_layers = {sorted(dense)}, decoder_sparse_step = {every}: "
            "leave no layer with experts; such a model is of model_type 'qwen3'"
        )
    return layers


def transformer(shape: Architecture) -> dict[str, Any]:
    experts = shape.experts
    assert experts
    # A list where it need not be makes checkpoints of another format.
    pattern = [int(layer in experts.layers) for layer in range(shape.num_layers)]
    return qwen3.transformer(shape) | {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": experts.experts_per_token,
        "moe_grouped_gemm": True,
        # Megatron-core refuses weights that are all 1; the router divides by them itself.
        "moe_router_pre_softmax": not experts.norm_topk_prob or experts.experts_per_token == 1,
        "moe_layer_freq": 1 if all(pattern) else pattern,
    }


DEFAULTS = {
    "moe_router_score_function": "softmax",
    "moe_router_dtype": "fp32",
    # Training on rewards leaves the balance to the model, unless the job says otherwise.
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}


def parameters(shape: Architecture) -> Iterator[Parameter]:
    assert shape.experts
    with_experts = shape.experts.layers
    return qwen3.model(
        shape,
        lambda layer: (
            *qwen3.attention(shape),
            *(_mixture(shape) if layer in with_experts else qwen3.dense_mlp(shape)),
        ),
    )


def _mixture(shape: Architecture) -> Iterator[Parameter]:
    experts = shape.experts
    assert experts
    num, hidden, channels = experts.num_experts, shape.hidden_size, experts.ffn_hidden_size
    yield Parameter(("mlp.router.weight",), {"mlp.gate.weight": (num, hidden)})
    yield Parameter(
        ("mlp.experts.weight1",),
        {
            "mlp.experts.{expert}.gate_proj.weight": (channels, hidden),
            "mlp.experts.{expert}.up_proj.weight": (channels, hidden),
        },
        "gate_up",
        num_experts=num,
        fused="mlp.experts.gate_up_proj",
    )
    yield Parameter(
        ("mlp.experts.weight2",),
        {"mlp.experts.{expert}.down_proj.weight": (hidden, channels)},
        "columns",
        num_experts=num,
        fused="mlp.experts.down_proj",
    )


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", read, transformer, parameters, DEFAULTS)
