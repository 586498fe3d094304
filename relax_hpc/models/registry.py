"""The architectures that can be trained. A new one is a file beside this one and a line here."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from relax_hpc.errors import ConfigError
from relax_hpc.models import (
    fields,
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_omni_moe,
    qwen3_vl,
    qwen3_vl_moe,
)
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.config_json import ConfigJson
from relax_hpc.models.family import Family
from relax_hpc.models.names import Parameter

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        llama.FAMILY,
        mistral.FAMILY,
        qwen2.FAMILY,
        qwen3.FAMILY,
        qwen3_moe.FAMILY,
        qwen3_vl.FAMILY,
        qwen3_vl_moe.FAMILY,
        qwen3_omni_moe.FAMILY,
    )
}


def read_architecture(folder: Path) -> Architecture:
    """Reads config.json of a Hugging Face folder.

    Raises:
        ConfigError: no such file, a key is missing or wrong, or a model that is none of `FAMILIES`
            or that the trainer would compute otherwise than transformers.
    """
    config = ConfigJson(folder)
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"{config.path}: model_type = {model_type!r}: only {', '.join(FAMILIES)} is supported"
        )
    fields.check(config)
    shape = FAMILIES[model_type].read(config)
    return replace(shape, names_class=config.get("architectures") is not None)


def parameters(shape: Architecture) -> Iterator[Parameter]:
    """Yields the model's parameters, in the order in which weights are exported."""
    return FAMILIES[shape.model_type].parameters(shape)
