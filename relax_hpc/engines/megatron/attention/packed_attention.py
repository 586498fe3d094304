"""Causal attention within the documents of a packed micro-batch; `choice` picks its kernel.

T = tokens of a packed micro-batch, documents end to end. With context parallelism each rank owns
two of its `2 * cp` equal chunks, the r-th from both ends, so that all have as much to attend to;
a rank gathers the keys and values of all, and its queries see them from their document's start.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from relax_hpc.devices import sent
from relax_hpc.engines.megatron.attention import context_parallel
from relax_hpc.engines.megatron.attention.balance import Documents
from relax_hpc.engines.megatron.vision.features import Seen

Cached = TypeVar("Cached")


class Run(NamedTuple):
    """Consecutive packed tokens, and the tokens they may see. [start, end) each."""

    queries: tuple[int, int]
    """Range of this rank's tokens."""
    keys: tuple[int, int]
    """Range of all tokens, from the start of the first query's document to the last query."""
    query_lengths: tuple[int, ...]
    """Per document, at least 1."""
    key_lengths: tuple[int, ...]
    """Per document; more than its queries only for the first, whose start another rank has."""


@dataclass
class Span:
    """A run with what a kernel wants to know about it."""

    run: Run
    cu_queries: Tensor
    """[documents + 1] int32, on the device."""
    cu_keys: Tensor
    is_causal: bool = True
    """Queries see the keys up to their own place; else all of their document."""
    made: dict[str, object] = field(default_factory=dict)

    def cached(self, key: str, make: Callable[[], Cached]) -> Cached:
        """Returns a value that all layers share; the first one makes it."""
        if key not in self.made:
            self.made[key] = make()
        return cast(Cached, self.made[key])

    @property
    def is_square(self) -> bool:
        """Every document's queries begin where its keys do."""
        return self.run.query_lengths == self.run.key_lengths


class Attend(Protocol):
    """A kernel. Query i of a document's last n sees all its keys but the last n - 1 - i."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, span: Span, scale: float
    ) -> Tensor:
        """[queries, heads, d], [keys, query groups, d] twice -> [queries, heads, d]."""
        ...


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """The places of a packed micro-batch's documents; travels as Megatron's packed_seq_params.

    `qkv_format` stays unset, so that Megatron rotates all T queries at once instead of looping over
    documents; documents restart at position 0 through `position_ids`.
    """

    spans: tuple[Span, ...] = ()
    group: dist.ProcessGroup | None = None
    """Context-parallel ranks, if there are several."""
    rotation: Tensor | None = None
    """Rotary angles that the layers share, once the first one has made them."""
    documents: Documents | None = None
    """Documents of this rank's tokens, for routers of experts."""
    routes: Tensor | None = None
    """[t, layers, k] experts to which they are to go, see `moe.replay`."""
    seen: Seen | None = None
    """Features of media that this rank's tokens see."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> "PackedRows":
        """Lays documents of these lengths out.

        Args:
            group: context-parallel ranks; their `2 * size` chunks divide the tokens.
        """
        size, rank = (group.size(), group.rank()) if group else (1, 0)
        spans = tuple(
            Span(
                run=run,
                cu_queries=_cumulated(run.query_lengths, device),
                cu_keys=_cumulated(run.key_lengths, device),
            )
            for run in runs(lengths, size, rank)
        )
        return cls(spans=spans, group=group if size > 1 else None)


def runs(lengths: Sequence[int], size: int = 1, rank: int = 0) -> list[Run]:
    """Returns what a context-parallel rank attends to, in the order of its tokens."""
    ends = list(accumulate(lengths))
    found, offset = [], 0
    for begin, end in context_parallel.chunks(ends[-1], size, rank):
        inside = [
            (start, stop)
            for start, stop in zip([0, *ends], ends, strict=False)
            if start < end and stop > begin
        ]
        found.append(
            Run(
                queries=(offset, offset + end - begin),
                keys=(inside[0][0], end),
                query_lengths=tuple(min(b, end) - max(a, begin) for a, b in inside),
                key_lengths=tuple(min(b, end) - a for a, b in inside),
            )
        )
        offset += end - begin
    return found


def _cumulated(lengths: Sequence[int], device: torch.device) -> Tensor:
    return sent(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


class PackedAttention(nn.Module):
    """Megatron's `core_attention`."""

    def __init__(
        self,
        config: Any,  # noqa: ANN401
        softmax_scale: float | None = None,
        *,
        attend: Attend,
        **_: object,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.attend = attend

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
            query: [T, 1, heads, d]; key and value: [T, 1, query groups, d]. T are this rank's.

        Returns:
            [T, 1, heads * d].
        """
        # Views: an index here would cost a copy, and one of zeros, in the backward pass.
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        rows = packed_seq_params
        if rows.group is not None:
            key, value = context_parallel.gather_keys(key, value, rows.group)
        if len(rows.spans) == 1:
            return self.attend(query, key, value, rows.spans[0], self.scale).flatten(1).unsqueeze(1)
        outs = []
        for span in rows.spans:
            queries, keys = slice(*span.run.queries), slice(*span.run.keys)
            outs.append(self.attend(query[queries], key[keys], value[keys], span, self.scale))
        return torch.cat(outs).flatten(1).unsqueeze(1)
