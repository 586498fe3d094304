"""Lists the architectures that can be trained.

A new one is a file here, an import and a line below, and a line in `fields` per unknown field of
config.json. Layers are pre-norm with RMSNorm, SwiGLU and rotary positions, dense or with experts
(`trainer.megatron.model`); another kind goes into `trainer.megatron.layers`. A model with media
also needs a recipe (`data.media.recipe.FAMILIES`), its encoder (`towers`,
`trainer.megatron.encoder`, `trainer.megatron.fit.part_of`) and, where SGLang's own differs, a
module in `inference.sglang.models`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from relax_hpc.config.hf_config import ConfigJson
from relax_hpc.errors import ConfigError
from relax_hpc.trainer.models import (
    fields,
    llama,
    qwen3,
    qwen3_moe,
    qwen3_omni_moe,
    qwen3_vl,
)
from relax_hpc.trainer.models.architecture import Architecture, Family
from relax_hpc.trainer.models.names import Parameter

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        llama.FAMILY,
        llama.MISTRAL,
        llama.QWEN2,
        qwen3.FAMILY,
        qwen3_moe.FAMILY,
        qwen3_vl.FAMILY,
        qwen3_vl.MOE,
        qwen3_omni_moe.FAMILY,
    )
}


def read_architecture(folder: Path) -> Architecture:
    """Reads config.json of a Hugging Face folder; raises as `architecture_of`."""
    return architecture_of(ConfigJson(folder))


def architecture_of(config: ConfigJson) -> Architecture:
    """Raises:
    ConfigError: no such file, a missing or wrong key, or a model outside `FAMILIES` or that the
        trainer would compute differently from transformers.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"{config.path}: model_type = {model_type!r}: only {', '.join(FAMILIES)} is supported"
        )
    family = FAMILIES[model_type]
    fields.check(config, family.causal)
    shape = family.read(config)
    return replace(shape, names_class=config.get("architectures") is not None)


def parameters(shape: Architecture) -> Iterator[Parameter]:
    """Yields the model's parameters, in order of export."""
    return FAMILIES[shape.model_type].parameters(shape)
