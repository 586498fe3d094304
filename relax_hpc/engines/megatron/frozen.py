"""Parts of a model that do not learn: no gradient, no state of the optimizer, no other weights."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from megatron.core.models.gpt import GPTModel

from relax_hpc.config.layout import FrozenPart
from relax_hpc.config.model import LoraConfig
from relax_hpc.engines.megatron.hf.hf_weights import is_of_adapter
from relax_hpc.models import qwen3_omni_moe, qwen3_vl
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.names import Adapter
from relax_hpc.models.registry import parameters


def freeze(chunks: Sequence[GPTModel], frozen: Collection[FrozenPart]) -> None:
    """Marks parameters, before gradient buffers and the optimizer are made."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(part_of(name) not in frozen)


def freeze_all_but_adapters(chunks: Sequence[GPTModel]) -> None:
    """Does as `freeze` with all of the model."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(is_of_adapter(name))


class Counts(NamedTuple):
    """The elements of all parameters of a model."""

    trained: int
    fixed: int
    """Elements that stay what they are: frozen, or adapted."""


def counts(shape: Architecture, frozen: Collection[FrozenPart], lora: LoraConfig) -> Counts:
    """Counts what learns in training, whatever the grid."""
    trained = fixed = 0
    for parameter in parameters(shape):
        matrices = list(parameter.hf.values())
        size = sum(map(math.prod, matrices)) * (parameter.num_experts or 1)
        learns = not lora.rank and part_of(parameter.core[0]) not in frozen
        trained, fixed = trained + size * learns, fixed + size * (not learns)
        if adapter := Adapter.of(parameter, lora.rank, lora.targets) if lora.rank else None:
            trained += lora.rank * sum(sum(matrices[source]) for source in adapter.sources)
    return Counts(trained, fixed)


def part_of(name: str) -> FrozenPart:
    """The part that a parameter belongs to, by its name in the model."""
    if name.startswith(qwen3_vl.CORE):
        return "vision_projection" if "merger" in name.split(".")[1] else "vision"
    if name.startswith(qwen3_omni_moe.CORE):
        return "audio_projection" if name.split(".")[1].startswith("proj") else "audio"
    return "language"
