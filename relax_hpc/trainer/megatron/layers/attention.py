"""Computes causal attention within the documents of a packed micro-batch; the kernel is one of
`attention_kernels`.

T = tokens of a packed micro-batch, documents end to end. With context parallelism each rank owns
two of its `2 * cp` equal chunks, the r-th from both ends, so that all ranks do equal work. A rank
gathers the keys and values of all, and its queries see them from their document's start.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from relax_hpc.runtime.devices import send
from relax_hpc.trainer.megatron import grid
from relax_hpc.trainer.megatron.features import VisibleFeatures
from relax_hpc.trainer.megatron.packing import TokenDocuments

Cached = TypeVar("Cached")


class PackedRange(NamedTuple):
    """Consecutive packed tokens, and the tokens they may see. [start, end) each."""

    queries: tuple[int, int]
    """Range of this rank's tokens."""
    keys: tuple[int, int]
    """Range of all tokens, from the start of the first query's document to the last query."""
    query_lengths: tuple[int, ...]
    """Per document, at least 1."""
    key_lengths: tuple[int, ...]
    """Per document; more than its queries only for the first, which may start on another rank."""


@dataclass
class PackedSpan:
    """A run with derived values for kernels."""

    run: PackedRange
    cu_queries: Tensor
    """[documents + 1] int32, on the device."""
    cu_keys: Tensor
    is_causal: bool = True
    """Whether queries see only keys up to their own place, or all of their document."""
    made: dict[str, object] = field(default_factory=dict)

    def get_or_make(self, key: str, make: Callable[[], Cached]) -> Cached:
        """Returns a value that all layers share; the first one computes it."""
        if key not in self.made:
            self.made[key] = make()
        return cast(Cached, self.made[key])

    @property
    def is_square(self) -> bool:
        """Whether every document's queries begin where its keys do."""
        return self.run.query_lengths == self.run.key_lengths


AttentionKernel = Callable[[Tensor, Tensor, Tensor, PackedSpan, float], Tensor]
"""A kernel: query [queries, heads, d], key and value [keys, query groups, d], span, scale ->
[queries, heads, d]. Query i of a document's last n sees all its keys but the last n - 1 - i."""


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """Positions of a packed micro-batch's documents; passed as Megatron's packed_seq_params.

    `qkv_format` stays unset, so that Megatron rotates all T queries at once instead of looping over
    documents; documents restart at position 0 through `position_ids`.
    """

    spans: tuple[PackedSpan, ...] = ()
    group: dist.ProcessGroup | None = None
    """Context-parallel ranks, if there are several."""
    rotation: Tensor | None = None
    """Rotary angles shared by the layers, computed by the first one."""
    documents: TokenDocuments | None = None
    """Documents of this rank's tokens, for routers of experts."""
    routes: Tensor | None = None
    """[t, layers, k] experts to replay, see `replay`."""
    seen: VisibleFeatures | None = None
    """Features of media that this rank's tokens see."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> "PackedRows":
        """Lays out documents of these lengths.

        Args:
            group: context-parallel ranks; their `2 * size` chunks divide the tokens.
        """
        size, rank = (group.size(), group.rank()) if group else (1, 0)
        spans = tuple(
            PackedSpan(
                run=run,
                cu_queries=_cumulate(run.query_lengths, device),
                cu_keys=_cumulate(run.key_lengths, device),
            )
            for run in runs(lengths, size, rank)
        )
        return cls(spans=spans, group=group if size > 1 else None)


def runs(lengths: Sequence[int], size: int = 1, rank: int = 0) -> list[PackedRange]:
    """Returns the runs of a context-parallel rank, in the order of its tokens."""
    ends = list(accumulate(lengths))
    found, offset = [], 0
    for begin, end in grid.chunks(ends[-1], size, rank):
        inside = [
            (start, stop)
            for start, stop in zip([0, *ends], ends, strict=False)
            if start < end and stop > begin
        ]
        found.append(
            PackedRange(
                queries=(offset, offset + end - begin),
                keys=(inside[0][0], end),
                query_lengths=tuple(min(b, end) - max(a, begin) for a, b in inside),
                key_lengths=tuple(min(b, end) - a for a, b in inside),
            )
        )
        offset += end - begin
    return found


def _cumulate(lengths: Sequence[int], device: torch.device) -> Tensor:
    return send(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


class PackedAttention(nn.Module):
    def __init__(
        self,
        config: Any,  # noqa: ANN401
        softmax_scale: float | None = None,
        *,
        attend: AttentionKernel,
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
            key, value = grid.gather_keys(key, value, rows.group)
        if len(rows.spans) == 1:
            return self.attend(query, key, value, rows.spans[0], self.scale).flatten(1).unsqueeze(1)
        outs = []
        for span in rows.spans:
            queries, keys = slice(*span.run.queries), slice(*span.run.keys)
            outs.append(self.attend(query[queries], key[keys], value[keys], span, self.scale))
        return torch.cat(outs).flatten(1).unsqueeze(1)
