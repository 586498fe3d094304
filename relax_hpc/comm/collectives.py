"""Collectives of a torch group for values that are no tensors: as JSON.

torch's own collectives of objects unpickle what comes, and its groups ask nobody who he is.

A value is made of dicts with text as keys, lists, text, numbers and None; a tuple arrives as a
list. Numbers arrive as they were, infinite ones and those that are none included. CPU tensors carry
it, which every group of ours takes (`torch_group`).
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
"""None is that of all ranks."""


def all_gather_json(value: Any, group: Group = None) -> list[Any]:  # noqa: ANN401
    """Every rank's value, by rank of the group.

    Raises:
        ValueError: what a rank sent is not JSON.
    """
    mine, size = _encoded(value), dist.get_world_size(group)
    if size == 1:
        return [_decoded(mine)]
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = mine.new_zeros(longest)
    padded[: len(mine)] = mine
    texts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(texts, padded, group=group)
    return [_decoded(text[: int(end)]) for text, end in zip(texts, lengths, strict=True)]


def broadcast_json(value: Any, source: int, group: Group = None) -> Any:  # noqa: ANN401
    """The value of rank `source` of the group; what the others pass in is not looked at.

    Raises:
        ValueError: what came is not JSON.
    """
    is_source = dist.get_rank(group) == source
    text = _encoded(value) if is_source else torch.empty(0, dtype=torch.uint8)
    if dist.get_world_size(group) == 1:
        return _decoded(text)
    length = torch.tensor([len(text)])
    dist.broadcast(length, group=group, group_src=source)
    if not is_source:
        text = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(text, group=group, group_src=source)
    return _decoded(text)


def _encoded(value: Any) -> Tensor:  # noqa: ANN401
    """[bytes] uint8"""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(text: Tensor) -> Any:  # noqa: ANN401
    return json.loads(text.numpy().tobytes())
