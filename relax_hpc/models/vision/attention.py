"""Attention of a tower: stretches of P rows end to end, each of which sees itself alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from relax_hpc.devices import sent


@dataclass(frozen=True)
class Lengths:
    """Where stretches begin and end."""

    rows: tuple[int, ...]
    """Rows of each."""
    cu_seqlens: Tensor
    """[stretches + 1] int32, on the device of the tower."""
    made: dict[str, object] = field(default_factory=dict)
    """Whatever a kernel makes of them once for all layers."""

    @classmethod
    def of(cls, rows: Sequence[int], device: torch.device) -> "Lengths":
        ends = torch.tensor([0, *accumulate(rows)], dtype=torch.int32, device="cpu")
        return cls(tuple(rows), sent(ends, device))


class Attend(Protocol):
    """A kernel: [P, heads, d] three times -> [P, heads, d]."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, lengths: Lengths) -> Tensor: ...


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths) -> Tensor:
    """Is the kernel that works everywhere.

    Stretches of one length that follow each other are computed in one call; on a GPU, in 16 bits,
    all are.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _in_one(query, key, value, lengths)
    outs, begin = [], 0
    for length, same in groupby(lengths.rows):
        end = begin + length * len(list(same))
        q, k, v = (
            x[begin:end].view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)
        )
        out = functional.scaled_dot_product_attention(q, k, v)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        begin = end
    return torch.cat(outs)


def _in_one(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens, longest = lengths.cu_seqlens, max(lengths.rows)
    out = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest)
    assert isinstance(out, Tensor)
    return out
