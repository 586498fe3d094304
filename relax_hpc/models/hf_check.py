"""Checks that a Hugging Face folder holds the model that its config.json describes."""

from collections.abc import Iterable

from relax_hpc.models.architecture import Architecture
from relax_hpc.models.hf_files import OUTPUT, HfFiles
from relax_hpc.models.names import Parameter
from relax_hpc.models.registry import FAMILIES


def check_names(
    files: HfFiles,
    shape: Architecture,
    parameters: Iterable[Parameter],
    *,
    part: int = 0,
    num_parts: int = 1,
) -> None:
    """Checks that the folder has the tensors of the architecture, and no others.

    Args:
        files: of the folder.
        shape: of the model.
        parameters: of the model.
        part: which of `num_parts` of an output matrix that repeats the embedding is read for that.
        num_parts: among ranks, for example.

    Raises:
        ConfigError: naming the first that is missing, too many, or not what it is said to be.
    """
    left = set(files.names) - set(files.named(FAMILIES[shape.model_type].kept))
    for parameter in parameters:
        names = [parameter.fused] if parameter.fused in left else list(parameter.names())
        missing = [name for name in names if name not in left]
        if missing:
            raise files.refused(
                f"has no tensor {missing[0]}, which model_type {shape.model_type!r} in config.json "
                "asks for; they must be of the same model"
            )
        left.difference_update(names)
    if shape.tied_embeddings:
        left.discard(OUTPUT)  # some folders repeat it
    if left:
        raise files.refused(
            f"has {len(left)} tensors that model_type {shape.model_type!r} in config.json does not "
            f"have, the first is {min(left)}; they must be of the same model"
        )
    if shape.tied_embeddings:
        files.check_tied(part, num_parts)


def check_shapes(files: HfFiles, parameters: Iterable[Parameter]) -> None:
    """Checks that all tensors are there, in whole files, and have the shapes that config.json says.

    Reads the head of every file, and no weights.

    Raises:
        ConfigError: naming the first that is not so.
    """
    for parameter in parameters:
        if parameter.fused in files.names:
            files.check_shape(parameter.fused, parameter.fused_shape)
            continue
        shapes = list(parameter.hf.values()) * (parameter.num_experts or 1)
        for name, expected in zip(parameter.names(), shapes, strict=True):
            files.check_shape(name, expected)
