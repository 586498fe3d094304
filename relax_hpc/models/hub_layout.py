"""Tensors as the hub's folders have them: experts of a layer fused, and parts that do not learn."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from relax_hpc.models.family import Family
from relax_hpc.models.hf_files import HfFiles
from relax_hpc.models.names import Parameter
from relax_hpc.models.registry import FAMILIES, parameters, read_architecture
from relax_hpc.records import read_json


def as_in_hub(tensors: Iterable[tuple[str, Tensor]], source: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a model, with experts fused if folders of its family have them so.

    Args:
        tensors: in the order of the model, expert by expert.
        source: folder whose config.json says which family it is.
    """
    family = _family_of(source)
    if family is None or not family.fuses_experts:
        yield from tensors
        return
    first = {
        next(parameter.names()): parameter
        for parameter in parameters(read_architecture(source))
        if parameter.fused
    }
    stream = iter(tensors)
    for name, tensor in stream:
        if name in first:
            yield first[name].fused, _fused(first[name], tensor, stream)
        else:
            yield name, tensor


def kept(source: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a folder that are of no part that learns, as they are."""
    family = _family_of(source)
    if family is None or not family.kept:
        return
    with HfFiles(source) as files:
        for name in files.named(family.kept):
            yield name, files.read(name)


def _family_of(folder: Path) -> Family | None:
    return FAMILIES.get((read_json(folder / "config.json") or {}).get("model_type", ""))


def _fused(parameter: Parameter, tensor: Tensor, stream: Iterator[tuple[str, Tensor]]) -> Tensor:
    """The fused tensor of a parameter whose first tensor is given; takes the others."""
    num_experts, *each = parameter.fused_shape
    fused = torch.empty(num_experts, *each, dtype=tensor.dtype)
    _, *others = parameter.names()
    for expert in fused:
        rows = expert.T if parameter.transposed else expert
        start = 0
        for length, *_ in parameter.hf.values():
            rows[start : start + length] = tensor
            start += length
            if others:
                name, tensor = next(stream)
                assert name == others.pop(0), f"{name} is not the next of {parameter.fused}"
    return fused
