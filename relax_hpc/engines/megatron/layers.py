"""The layers Megatron-core lacks without Transformer Engine: norm, rotary positions, attention.

T = tokens of a packed micro-batch, documents end to end; B documents, of at most S tokens.
Hidden states are [T, 1, h] and queries [T, 1, heads, d]: to Megatron-core a micro-batch is one long
sequence, and only `PackedAttention` and `RotaryByPosition` know where its documents begin.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn
from torch.nn import functional

_WASTE = 0.8
"""Documents share a padded block when the shortest fills at least this much of its width."""
_SMALL = 8
"""Tokens of padding that are always cheaper than one more attention call."""


class Block(NamedTuple):
    """A rectangle of the padded buffer: `num_documents` x `width` slots."""

    num_documents: int
    width: int


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """Where the documents of a packed micro-batch lie; travels as Megatron's packed_seq_params.

    `qkv_format` stays unset, so that Megatron rotates all T queries at once instead of looping over
    documents; documents restart at position 0 through `position_ids`.
    """

    cu_seqlens: Tensor | None = None
    """[B + 1] int32."""
    max_length: int = 0
    slots: Tensor | None = None
    """[T] where a token sits when documents of similar length are padded into blocks."""
    blocks: tuple[Block, ...] = ()

    @classmethod
    def of(cls, lengths: Sequence[int], cu_seqlens: Tensor) -> "PackedRows":
        blocks, slots = _blocks(lengths)
        device = cu_seqlens.device
        return cls(
            cu_seqlens=cu_seqlens,
            max_length=max(lengths),
            slots=slots.to(device),
            blocks=blocks,
        )


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


_pad: Callable[[Tensor, Tensor | None, int], Any] = _Pad.apply
_unpad: Callable[[Tensor, Tensor | None], Tensor] = _Unpad.apply


class PackedAttention(nn.Module):
    """Causal attention within each document, grouped queries; Megatron's `core_attention`."""

    def __init__(
        self,
        config: Any,  # noqa: ANN401
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackedRows,
        **_: object,
    ) -> Tensor:
        """Attends.

        Args:
            query: [T, 1, heads, d]; key and value: [T, 1, query groups, d].

        Returns:
            [T, 1, heads * d].
        """
        attend = self._varlen if _has_varlen_kernel(query) else self._padded
        return attend(query[:, 0], key[:, 0], value[:, 0], packed_seq_params).flatten(1)[:, None]

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        cu, longest = rows.cu_seqlens, rows.max_length
        assert cu is not None
        # torch 2.11 shares key heads without being told; later versions want to be.
        known = inspect.signature(varlen_attn).parameters
        grouped: dict[str, Any] = (
            {"enable_gqa": query.shape[1] != key.shape[1]} if "enable_gqa" in known else {}
        )
        out = varlen_attn(
            query, key, value, cu, cu, longest, longest,
            scale=self.scale, window_size=(-1, 0), **grouped,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        # Padding sits behind the document, where causal queries do not look.
        slots, blocks = rows.slots, rows.blocks
        sizes = [block.num_documents * block.width for block in blocks]
        parts = [_pad(x, slots, sum(sizes)).split(sizes) for x in (query, key, value)]
        outs = []
        for block, *qkv in zip(blocks, *parts, strict=True):
            q, k, v = (x.unflatten(0, block).transpose(1, 2) for x in qkv)
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return _unpad(torch.cat(outs), slots)


def _has_varlen_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


class RMSNorm(nn.Module):
    """As Hugging Face computes it (float32 inside), with the mark sequence parallelism needs."""

    def __init__(
        self,
        config: Any,  # noqa: ANN401
        hidden_size: int,
        eps: float = 1e-6,
        **_: object,
    ) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


class RotaryByPosition(nn.Module):
    """Rotary angles of explicit positions.

    Megatron's own module takes a length, not positions, and so cannot restart at each document.
    """

    inverse_frequencies: Tensor

    def __init__(self, head_dim: int, base: float, device: torch.device) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        self.register_buffer("inverse_frequencies", 1.0 / base**exponents, persistent=False)

    def forward(self, position_ids: Tensor, *_: object, **__: object) -> Tensor:
        """[1, T] positions -> [T, 1, 1, head_dim] radians, the two halves alike."""
        angles = position_ids[0, :, None].float() * self.inverse_frequencies
        return torch.cat([angles, angles], dim=-1)[:, None, None]
