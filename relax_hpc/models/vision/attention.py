"""Attention of patches to all patches of their frame, frames end to end."""

from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from relax_hpc.models.vision.frames import Places


def attend(query: Tensor, key: Tensor, value: Tensor, places: Places) -> Tensor:
    """[P, heads, d] three times -> [P, heads, d].

    Frames of one size that follow each other are computed in one call; on a GPU, in 16 bits, all
    frames are.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _in_one(query, key, value, places)
    outs, begin = [], 0
    for length, same in groupby(places.lengths):
        end = begin + length * len(list(same))
        q, k, v = (
            x[begin:end].view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)
        )
        out = functional.scaled_dot_product_attention(q, k, v)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        begin = end
    return torch.cat(outs)


def _in_one(query: Tensor, key: Tensor, value: Tensor, places: Places) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens, longest = places.cu_seqlens, max(places.lengths)
    out = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest)
    assert isinstance(out, Tensor)
    return out
