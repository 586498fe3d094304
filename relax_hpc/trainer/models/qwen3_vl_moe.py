"""Qwen3-VL with a mixture of experts: Qwen3-MoE with a vision encoder."""

from collections.abc import Iterator
from dataclasses import replace

from relax_hpc.config.hf_config import ConfigJson
from relax_hpc.trainer.models import qwen3, qwen3_moe, qwen3_vl
from relax_hpc.trainer.models.architecture import Architecture, Family
from relax_hpc.trainer.models.names import Parameter


def read(config: ConfigJson) -> Architecture:
    text = config.table("text_config")
    # transformers shares a weight of 1 among a token's experts, whatever is written.
    if not text.flag("norm_topk_prob", True):
        raise text.make_error("norm_topk_prob", "only true is supported: transformers does so")
    dense = qwen3.read_shape(text, sees=True, rope_base=qwen3_vl.ROPE_BASE)
    experts = replace(qwen3_moe.read_experts(text, dense.num_layers), norm_topk_prob=True)
    return qwen3_vl.seeing(config, replace(dense, experts=experts))


def parameters(shape: Architecture) -> Iterator[Parameter]:
    yield from qwen3_vl.tower(shape)
    for parameter in qwen3_vl.in_language(qwen3_moe.parameters(shape)):
        yield replace(parameter, transposed=bool(parameter.fused))


FAMILY = Family(
    "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", read, qwen3_moe.transformer,
    parameters, qwen3_moe.DEFAULTS, fuses_experts=True,
)  # fmt: skip
