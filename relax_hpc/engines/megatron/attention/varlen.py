"""Packed attention by torch's `varlen_attn` (FlashAttention 2)."""

import inspect
from functools import cache
from typing import Any

from torch import Tensor

from relax_hpc.engines.megatron.attention.packed_attention import Span


def attend(query: Tensor, key: Tensor, value: Tensor, span: Span, scale: float) -> Tensor:
    """See `attention.Attend`."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 shares key heads without being told; later versions want to be.
    grouped: dict[str, Any] = (
        {"enable_gqa": query.shape[1] != key.shape[1]} if _takes_enable_gqa() else {}
    )
    out = varlen_attn(
        query, key, value, span.cu_queries, span.cu_keys,
        max(span.run.query_lengths), max(span.run.key_lengths),
        scale=scale, window_size=(-1, 0), **grouped,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


@cache
def _takes_enable_gqa() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
