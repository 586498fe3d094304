"""Parts of a model, by the names of its parameters, and how many elements of them learn."""

import math
from collections.abc import Collection
from typing import NamedTuple

from relax_hpc.config.layout import FrozenPart
from relax_hpc.config.model import LoraConfig
from relax_hpc.models import qwen3_omni_moe, qwen3_vl
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.names import Adapter
from relax_hpc.models.registry import parameters


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
