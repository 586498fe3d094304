"""Hugging Face names and layouts <-> Megatron-core's, streamed tensor by tensor, bitwise.

Megatron-core stores q, k and v of a query group side by side (`[q.., k, v]` per group), gate and up
as one matrix, and splits each of them, the embedding and the output over tensor-parallel ranks.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open
from torch import Tensor

from relax_hpc.errors import ConfigError

Layout = Literal["whole", "rows", "columns", "gate_up", "qkv"]
"""How tensor-parallel ranks share it: all of it, split by dimension 0 or 1, or the two packings."""


class Mapping(NamedTuple):
    """One Megatron-core parameter of this rank."""

    core: str
    layout: Layout
    hf: tuple[str, ...]
    """Hugging Face tensors it is packed from."""


_OUTER: dict[str, tuple[Layout, str]] = {
    "embedding.word_embeddings.weight": ("rows", "model.embed_tokens.weight"),
    "output_layer.weight": ("rows", "lm_head.weight"),
    "decoder.final_layernorm.weight": ("whole", "model.norm.weight"),
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LAYER: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "input_layernorm.weight": ("whole", ("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": ("whole", ("post_attention_layernorm.weight",)),
    "self_attention.linear_qkv.weight": ("qkv", tuple(f"{x}.weight" for x in _QKV)),
    "self_attention.linear_qkv.bias": ("qkv", tuple(f"{x}.bias" for x in _QKV)),
    "self_attention.linear_proj.weight": ("columns", ("self_attn.o_proj.weight",)),
    "self_attention.q_layernorm.weight": ("whole", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("whole", ("self_attn.k_norm.weight",)),
    "mlp.linear_fc1.weight": ("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("columns", ("mlp.down_proj.weight",)),
}


def mappings(model: GPTModel) -> Iterator[Mapping]:
    """The parameters of a chunk of layers on this rank, in its order."""
    offset = get_transformer_layer_offset(model.config, model.vp_stage)
    for core, _ in model.named_parameters():
        if core in _OUTER:
            layout, name = _OUTER[core]
            yield Mapping(core, layout, (name,))
            continue
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", core)
        assert match, core
        layout, names = _LAYER[match[2]]
        prefix = f"model.layers.{int(match[1]) + offset}."
        yield Mapping(core, layout, tuple(prefix + name for name in names))


@torch.no_grad()
def load(chunks: Sequence[GPTModel], folder: Path) -> None:
    """Fills the chunks' parameters from the safetensors of a Hugging Face folder.

    Raises:
        ConfigError: no safetensors, or a tensor is missing or of another shape.
    """
    files = _files_by_tensor(folder)
    for model in chunks:
        _load(model, folder, files)


def _load(model: GPTModel, folder: Path, files: dict[str, str]) -> None:
    parameters = dict(model.named_parameters())
    for mapping in mappings(model):
        sources = [_read(folder, files, name) for name in mapping.hf]
        shard = _shard(mapping.layout, sources, model.config)
        parameter = parameters[mapping.core]
        if shard.shape != parameter.shape:
            raise ConfigError(
                f"model.path = {folder}: {', '.join(mapping.hf)} gives {list(shard.shape)}, "
                f"config.json asks for {list(parameter.shape)}"
            )
        parameter.copy_(shard)


def named_weights(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, Tensor]]:
    """Full tensors in Hugging Face names, on the model's device, one at a time.

    Collective over the tensor-parallel group: every rank iterates to the end. The tensors may alias
    the parameters; a tied output matrix is not repeated.
    """
    (model,) = chunks
    parameters = dict(model.named_parameters())
    for mapping in mappings(model):
        whole = _gather(mapping.layout, parameters[mapping.core].detach())
        yield from zip(mapping.hf, _unpack(mapping.layout, whole, model.config), strict=True)


def _files_by_tensor(folder: Path) -> dict[str, str]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return weight_map
    if single.exists():
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    raise ConfigError(f"model.path = {folder}: has no {single.name} and no {index.name}")


def _read(folder: Path, files: dict[str, str], name: str) -> Tensor:
    if name not in files:
        raise ConfigError(f"model.path = {folder}: has no tensor {name}")
    with safe_open(folder / files[name], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _shard(layout: Layout, tensors: list[Tensor], config: TransformerConfig) -> Tensor:
    size = mpu.get_tensor_model_parallel_world_size()
    rank = mpu.get_tensor_model_parallel_rank()
    if layout == "whole":
        return tensors[0]
    if layout == "columns":
        return _part(tensors[0], rank, size, dim=1)
    if layout == "gate_up":
        return torch.cat([_part(tensor, rank, size) for tensor in tensors])
    if layout == "qkv":
        by_group = [t.view(config.num_query_groups, -1, *t.shape[1:]) for t in tensors]
        return _part(torch.cat(by_group, dim=1).flatten(0, 1), rank, size)
    return _part(tensors[0], rank, size)


def _part(tensor: Tensor, rank: int, size: int, dim: int = 0) -> Tensor:
    return torch.chunk(tensor, size, dim)[rank]


def _gather(layout: Layout, shard: Tensor) -> list[Tensor]:
    group = mpu.get_tensor_model_parallel_group()
    if layout == "whole" or group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def _unpack(layout: Layout, shards: list[Tensor], config: TransformerConfig) -> list[Tensor]:
    if layout == "columns":
        return [torch.cat(shards, dim=1)]
    if layout == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat(parts) for parts in zip(*halves, strict=True)]
    whole = torch.cat(shards) if len(shards) > 1 else shards[0]
    if layout == "qkv":
        head, groups = config.kv_channels, config.num_query_groups
        queries = config.num_attention_heads // groups * head
        by_group = whole.view(groups, -1, *whole.shape[1:])
        split = torch.split(by_group, [queries, head, head], dim=1)
        return [part.flatten(0, 1) for part in split]
    return [whole]
