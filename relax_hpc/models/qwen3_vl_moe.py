"""Qwen3-VL with a mixture of experts: Qwen3-MoE with a tower that sees."""

from collections.abc import Iterator
from dataclasses import replace

from relax_hpc.models import qwen3, qwen3_moe, qwen3_vl
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.config_json import ConfigJson
from relax_hpc.models.family import Family
from relax_hpc.models.names import Parameter


def read(config: ConfigJson) -> Architecture:
    text = config.table("text_config")
    # transformers shares a weight of 1 among a token's experts, whatever is written.
    if not text.flag("norm_topk_prob", True):
        raise text.refused("norm_topk_prob", "only true is supported: transformers does so")
    dense = qwen3.read_shape(text, sees=True, rope_base=qwen3_vl.ROPE_BASE)
    experts = replace(qwen3_moe.read_experts(text, dense.num_layers), norm_topk_prob=True)
    return qwen3_vl.seeing(config, replace(dense, experts=experts))


def parameters(shape: Architecture) -> Iterator[Parameter]:
    yield from qwen3_vl.tower(shape)
    for parameter in qwen3_vl.in_language(qwen3_moe.parameters(shape)):
        yield replace(parameter, transposed=bool(parameter.fused))


FAMILY = Family(
    "qwen3_vl_moe", read, qwen3_moe.transformer, qwen3_moe.defaults, parameters, fuses_experts=True
)
