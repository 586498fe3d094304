"""Parts of a model that do not learn: no gradient, no state of the optimizer, no other weights."""

from collections.abc import Collection, Sequence

from megatron.core.models.gpt import GPTModel

from relax_hpc.config.layout import FrozenPart
from relax_hpc.engines.megatron.hf.hf_weights import is_of_adapter
from relax_hpc.engines.megatron.parts import part_of


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
