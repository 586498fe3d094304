"""Packed attention by torch's scaled_dot_product_attention: documents padded into blocks.

Runs anywhere, in any precision. No mask but for a document whose start another rank has.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from relax_hpc.engines.megatron.attention.packed_attention import Span

_WASTE = 0.8
"""Documents share a padded block when the shortest fills at least this much of its width."""
_SMALL = 8
"""Tokens of padding that are always cheaper than one more attention call."""


class Block(NamedTuple):
    """A rectangle of the padded buffer: `num_documents` x `width` slots."""

    num_documents: int
    width: int


def attend(query: Tensor, key: Tensor, value: Tensor, span: Span, scale: float) -> Tensor:
    """See `attention.Attend`."""
    if span.is_square:
        return _padded(query, key, value, span, span.run.query_lengths, scale)
    # Only the first document has keys before its queries.
    queries, keys = span.run.query_lengths[0], span.run.key_lengths[0]
    first = _tail(query[:queries], key[:keys], value[:keys], scale)
    if len(query) == queries:
        return first
    rest = _padded(
        query[queries:], key[keys:], value[keys:], span, span.run.query_lengths[1:], scale
    )
    return torch.cat([first, rest])


def _tail(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    queries, keys = len(query), len(key)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: Span,
    lengths: Sequence[int],
    scale: float,
) -> Tensor:
    # Padding sits behind the document, where causal queries do not look.
    blocks, on_host = span.cached("blocks", lambda: _blocks(lengths))
    slots = span.cached("slots", lambda: on_host.to(query.device))
    sizes = [block.num_documents * block.width for block in blocks]
    parts = [_pad(x, slots, sum(sizes)).split(sizes) for x in (query, key, value)]
    outs = []
    for block, *qkv in zip(blocks, *parts, strict=True):
        q, k, v = (x.unflatten(0, block).transpose(1, 2) for x in qkv)
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return _unpad(torch.cat(outs), slots)


def _blocks(lengths: Sequence[int]) -> tuple[tuple[Block, ...], Tensor]:
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    blocks: list[list[int]] = []  # document indices
    for i in order:
        width = lengths[blocks[-1][0]] if blocks else 0
        if width and (lengths[i] >= _WASTE * width or width - lengths[i] <= _SMALL):
            blocks[-1].append(i)
        else:
            blocks.append([i])
    first_slot = torch.zeros(len(lengths), dtype=torch.int64)
    offset = 0
    for block in blocks:
        width = lengths[block[0]]
        first_slot[block] = offset + width * torch.arange(len(block))
        offset += width * len(block)
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    within = torch.arange(int(sizes.sum())) - starts.repeat_interleave(sizes)
    slots = first_slot.repeat_interleave(sizes) + within
    return tuple(Block(len(b), lengths[b[0]]) for b in blocks), slots


class _Pad(torch.autograd.Function):
    """[T, ...] -> [slots, ...]. index_copy and index_select, both ways: no slow index_add."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, slots: Tensor, num_slots: int) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(slots)
        return packed.new_zeros(num_slots, *packed.shape[1:]).index_copy_(0, slots, packed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (slots,) = ctx.saved_tensors
        return grad.index_select(0, slots), None, None


class _Unpad(torch.autograd.Function):
    """[slots, ...] -> [T, ...]; padding gets no gradient."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(slots)
        ctx.num_slots = len(padded)
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (slots,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_slots, *grad.shape[1:]).index_copy_(0, slots, grad), None


_pad: Callable[[Tensor, Tensor, int], Any] = _Pad.apply
_unpad: Callable[[Tensor, Tensor], Tensor] = _Unpad.apply
