"""Attention of the towers by the kernel of the language model, where that takes them."""

import math
from typing import cast

from torch import Tensor

from relax_hpc.engines.megatron.attention.cudnn import CudnnAttention
from relax_hpc.engines.megatron.attention.packed_attention import Attend, Run, Span
from relax_hpc.models.vision import attention
from relax_hpc.models.vision.attention import Lengths


def of_towers(attend: Attend) -> attention.Attend:
    """Returns the kernel of the towers of a model whose text has this one."""
    return _ByCudnn(attend) if isinstance(attend, CudnnAttention) else attention.attend


class _ByCudnn:
    """Every stretch is a document that sees all of itself."""

    def __init__(self, attend: CudnnAttention) -> None:
        self._attend = attend
        self._takes: dict[int, bool] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, lengths: Lengths) -> Tensor:
        channels = query.shape[-1]
        span, scale = _span(lengths, len(query)), 1 / math.sqrt(channels)
        if channels not in self._takes:
            self._takes[channels] = self._attend.takes(query, key, span, scale)
        if not self._takes[channels]:
            return attention.attend(query, key, value, lengths)
        return self._attend(query, key, value, span, scale)


def _span(lengths: Lengths, rows: int) -> Span:
    """Returns the one that all layers share."""
    if "span" not in lengths.made:
        run = Run((0, rows), (0, rows), lengths.rows, lengths.rows)
        ends = lengths.cu_seqlens
        lengths.made["span"] = Span(run, ends, ends, is_causal=False)
    return cast(Span, lengths.made["span"])
