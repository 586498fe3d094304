"""Maps a model's parameters to Hugging Face names, and loads this rank's part of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from relax_hpc.config.model import LoraConfig
from relax_hpc.trainer.megatron.layers import lora as layers
from relax_hpc.trainer.models.architecture import Architecture
from relax_hpc.trainer.models.hf_files import HfFiles, check_names
from relax_hpc.trainer.models.names import Adapter, Parameter, TensorPiece
from relax_hpc.trainer.models.registry import parameters, read_architecture

_LAYERS = "decoder.layers."
VALUE_HEAD = "value_head."
"""Prefix of the parameters of a critic's head, absent in Hugging Face folders."""


class Sharing(NamedTuple):
    """How the ranks of a pipeline stage share a kind of matrices."""

    rank: int
    """Index of the rank's part of every matrix."""
    size: int
    expert_rank: int = 0
    """Index of the rank's part of the experts."""
    expert_size: int = 1

    @classmethod
    def of(cls, parameter: Parameter) -> "Sharing":
        if not parameter.num_experts:
            return cls(
                mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
            )
        return cls(
            mpu.get_expert_tensor_parallel_rank(),
            mpu.get_expert_tensor_parallel_world_size(),
            mpu.get_expert_model_parallel_rank(),
            mpu.get_expert_model_parallel_world_size(),
        )


class Owned(NamedTuple):
    """A parameter, and this rank's part of it."""

    parameter: Parameter
    copies: list[nn.Parameter]
    """Empty if it is on another stage; a tied one may be here twice."""


def list_owned(chunks: Sequence[GPTModel], shape: Architecture) -> list[Owned]:
    here = _by_name(chunks)
    found = []
    for parameter in parameters(shape):
        copies = [here.pop(name) for name in parameter.core if name in here]
        found.append(Owned(parameter, copies))
    assert not here, f"{shape.model_type} has no names for {sorted(here)}"
    return found


def _by_name(chunks: Sequence[GPTModel]) -> dict[str, nn.Parameter]:
    """Returns parameters of all chunks; layers by their number in the model."""
    named = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if not name.startswith(VALUE_HEAD) and not is_of_adapter(name):
                named[_in_model(chunk, name)] = parameter
    return named


def _in_model(chunk: GPTModel, name: str) -> str:
    if not name.startswith(_LAYERS):
        return name
    offset = get_transformer_layer_offset(chunk.config, chunk.vp_stage)
    number, rest = name.removeprefix(_LAYERS).split(".", 1)
    return f"{_LAYERS}{int(number) + offset}.{rest}"


def is_of_adapter(name: str) -> bool:
    return name.endswith((".lora_a", ".lora_b"))


def add_adapters(
    chunks: Sequence[GPTModel], shape: Architecture, lora: LoraConfig, seed: int
) -> None:
    """Adds an adapter to every layer with a target; it changes nothing yet."""
    adapters = {
        name: (parameter, adapter)
        for parameter in parameters(shape)
        if (adapter := Adapter.of(parameter, lora.rank, lora.targets))
        for name in parameter.core
    }
    for chunk in chunks:
        for name, _ in list(chunk.named_parameters()):
            if found := adapters.get(_in_model(chunk, name)):
                layer = chunk.get_submodule(name.removesuffix(".weight"))
                layers.adapt(layer, *found, lora, seed)


def by_expert(tensor: Tensor, parameter: Parameter, size: int) -> list[Tensor]:
    """Returns views of the shard of each expert; of one shard without experts."""
    return list(tensor.view(-1, *parameter.shard_shape(size)))


@torch.no_grad()
def load(chunks: Sequence[GPTModel], folder: Path) -> None:
    """Fills the chunks' parameters from the safetensors of a Hugging Face folder.

    A rank reads its own part of them, a tensor at a time. Adapters add nothing afterwards.

    Raises:
        ConfigError: no safetensors, a damaged file, or a mismatch with config.json.
    """
    shape = read_architecture(folder)
    with HfFiles(folder) as files:
        rank, size = dist.get_rank(), dist.get_world_size()
        check_names(files, shape, parameters(shape), part=rank, num_parts=size)
        for parameter, copies in list_owned(chunks, shape):
            for own in copies:
                fill(files, parameter, own, Sharing.of(parameter))
    layers.set_to_nothing(chunks)


def fill(files: HfFiles, parameter: Parameter, own: Tensor, sharing: Sharing) -> None:
    shards = by_expert(own, parameter, sharing.size)
    if parameter.fused in files.names:
        files.check_shape(parameter.fused, parameter.fused_shape)
    for number, shard in enumerate(shards, start=sharing.expert_rank * len(shards)):
        for piece in parameter.pieces(sharing.rank, sharing.size):
            here = shard.narrow(piece.dim, piece.target, piece.length)
            here.copy_(_read(files, parameter, number, piece))


def _read(files: HfFiles, parameter: Parameter, expert: int, piece: TensorPiece) -> Tensor:
    name, shape = list(parameter.hf.items())[piece.source]
    others = [slice(None)] * piece.dim
    if parameter.fused in files.names:
        before = sum(rows for rows, *_ in list(parameter.hf.values())[: piece.source])
        along = slice(before + piece.start, before + piece.start + piece.length)
        place = [*others, along]
        if parameter.transposed:
            place = [*[slice(None)] * (1 - piece.dim), along]
        read = files.read(parameter.fused, slice(expert, expert + 1), *place)[0]
        return read.T if parameter.transposed else read
    name = name.format(expert=expert)
    files.check_shape(name, shape)
    return files.read(name, *others, slice(piece.start, piece.start + piece.length))
