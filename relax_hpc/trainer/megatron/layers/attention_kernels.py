"""Chooses the attention kernel: cuDNN, torch's `varlen_attn` (FlashAttention 2), or SDPA.

SDPA pads documents into blocks. It runs anywhere, in any precision, and needs a mask only for a
document that starts on another rank.

cuDNN's graphs come through the package nvidia-cudnn-frontend. A graph is built for a padded number
of documents and a padded longest one, and reused: absent documents have length 0 and cost nothing,
and a new mix seldom needs a new graph. A single document needs no padding mask and offsets, which
is 6 % faster; its few padding tokens lie behind it, where causal queries do not look.
"""

import importlib.util
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from relax_hpc.errors import ConfigError
from relax_hpc.trainer.megatron.layers.attention import AttentionKernel, PackedRange, PackedSpan
from relax_hpc.trainer.models import towers
from relax_hpc.trainer.models.towers import SequenceOffsets

log = logging.getLogger(__name__)


def choose(name: str, device: torch.device, dtype: torch.dtype) -> AttentionKernel:
    """Returns the kernel called `actor.advanced.attention`, or the fastest that works here; logs
    which.

    Raises:
        ConfigError: the requested one does not work here.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    works = {
        "cudnn": device.type == "cuda" and half and _importable("cudnn"),
        "varlen": device.type == "cuda" and half and _importable("torch.nn.attention.varlen"),
        "sdpa": True,
    }
    chosen = next(kernel for kernel, it_does in works.items() if it_does)
    if name != "auto":
        if not works[name]:
            raise ConfigError(
                f'actor.advanced.attention = "{name}": does not work with {dtype} on {device.type} '
                f'here (it needs {_NEEDS[name]}); use "auto", which is "{chosen}"'
            )
        chosen = name
    log.info("attention: %s", chosen)
    return _load(chosen)


_NEEDS = {
    "cudnn": "a GPU, 16-bit weights and the package nvidia-cudnn-frontend",
    "varlen": "a GPU, 16-bit weights and torch >= 2.10",
    "sdpa": "nothing",
}


def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _load(name: str) -> AttentionKernel:
    if name == "cudnn":
        return CudnnAttention()
    if name == "varlen":
        return attend_varlen
    return attend_sdpa


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, span: PackedSpan, scale: float
) -> Tensor:
    """See `AttentionKernel`."""
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


_WASTE = 0.8
"""Documents share a padded block when the shortest fills at least this much of its width."""
_SMALL = 8
"""Padding tokens that always cost less than one more attention call."""


class Block(NamedTuple):
    """A rectangle of the padded buffer: `num_documents` x `width` slots."""

    num_documents: int
    width: int


def attend_sdpa(
    query: Tensor, key: Tensor, value: Tensor, span: PackedSpan, scale: float
) -> Tensor:
    """See `AttentionKernel`."""
    if span.is_square:
        return _attend_padded(query, key, value, span, span.run.query_lengths, scale)
    # Only the first document has keys before its queries.
    queries, keys = span.run.query_lengths[0], span.run.key_lengths[0]
    first = _tail(query[:queries], key[:keys], value[:keys], scale)
    if len(query) == queries:
        return first
    rest = _attend_padded(
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


def _attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: PackedSpan,
    lengths: Sequence[int],
    scale: float,
) -> Tensor:
    # Padding sits behind the document, where causal queries do not look.
    blocks, on_host = span.get_or_make("blocks", lambda: _blocks(lengths))
    slots = span.get_or_make("slots", lambda: on_host.to(query.device))
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
    """[T, ...] -> [slots, ...]. index_copy and index_select in both directions avoid slow
    index_add."""

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


_TOKENS = 4096
"""Total tokens are rounded up to a multiple: they only size the workspace."""
_SINGLE = 256
"""A single document is padded to a multiple."""
_GRAPHS = 512
"""Graphs kept, least recently used first out; building one takes 50 ms."""


class GraphShape(NamedTuple):
    """The sizes that a graph is built for; lengths and counts are upper bounds."""

    documents: int
    queries: int
    keys: int
    total_queries: int
    total_keys: int
    heads: int
    groups: int
    head_dim: int
    is_square: bool
    is_causal: bool
    is_single: bool
    """One document that fills its tensors."""
    dtype: torch.dtype
    scale: float


Layout = dict[str, Tensor]
"""The places of a span's documents: offsets in elements of queries, keys and statistics, [documents
+ 1, 1, 1, 1] int32, and lengths, [documents, 1, 1, 1] int32, padded with 0."""


class Graph(NamedTuple):
    graph: Any
    tensors: dict[str, Any]
    workspace_bytes: int


class CudnnAttention:
    """An `AttentionKernel` that keeps its graphs and one workspace; for one stream at a time."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[GraphShape, bool], Graph] = {}
        self._workspace: Tensor | None = None
        self._handle: Any = None
        self._refused: set[tuple[int, bool]] = set()
        """Head sizes, and whether causal, whose single documents cuDNN refuses."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, span: PackedSpan, scale: float
    ) -> Tensor:
        shape = _shape_of(query, key, span, scale)
        missing = -len(query) % _SINGLE
        is_single = len(span.run.query_lengths) == 1 and span.is_square
        if is_single and (span.is_causal or not missing):
            single = shape._replace(
                queries=len(query) + missing, keys=len(query) + missing, is_single=True
            )
            if self._takes(single):
                query, key, value = (_fill(x, missing) for x in (query, key, value))
                out = self._attend(query, key, value, single, {})
                return out[:-missing] if missing else out
        layout = span.get_or_make("cudnn", lambda: _layout(span, shape))
        return self._attend(query, key, value, shape, layout)

    def _takes(self, single: GraphShape) -> bool:
        kind = (single.head_dim, single.is_causal)
        if kind not in self._refused and not self._can_build(single):
            self._refused.add(kind)
        return kind not in self._refused

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, shape: GraphShape, layout: Layout
    ) -> Tensor:
        apply = _CudnnFunction.apply
        out = apply(query.contiguous(), key.contiguous(), value.contiguous(), self, shape, layout)  # type: ignore[no-untyped-call]
        assert isinstance(out, Tensor)
        return out

    def takes(self, query: Tensor, key: Tensor, span: PackedSpan, scale: float) -> bool:
        """Whether this version of cuDNN supports such documents."""
        return self._can_build(_shape_of(query, key, span, scale))

    def _can_build(self, shape: GraphShape) -> bool:
        import cudnn

        try:
            self._graph(shape, backward=False)
            self._graph(shape, backward=True)
        except cudnn.cudnnGraphNotSupportedError as error:
            log.warning("cuDNN does not take %s: %s", shape, error)
            return False
        return True

    def _graph(self, shape: GraphShape, *, backward: bool) -> Graph:
        import cudnn

        if self._handle is None:
            self._handle = cudnn.create_handle()
            cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
        graph = self._graphs.pop((shape, backward), None)
        if graph is None:
            graph = _build(shape, self._handle, backward=backward)
            if len(self._graphs) >= _GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        self._graphs[shape, backward] = graph  # behind those used longer ago
        return graph

    def execute(self, shape: GraphShape, *, backward: bool, tensors: dict[str, Tensor]) -> None:
        """Runs the graph, on the current stream."""
        import cudnn

        graph = self._graph(shape, backward=backward)
        cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
        if self._workspace is None or self._workspace.numel() < graph.workspace_bytes:
            self._workspace = None  # before the larger one
            self._workspace = torch.empty(graph.workspace_bytes, dtype=torch.uint8, device="cuda")
        graph.graph.execute(
            {graph.tensors[name]: tensor for name, tensor in tensors.items()},
            self._workspace,
            handle=self._handle,
        )


def _shape_of(query: Tensor, key: Tensor, span: PackedSpan, scale: float) -> GraphShape:
    return GraphShape(
        documents=_round_up(len(span.run.query_lengths)),
        queries=max(128, _round_up(max(span.run.query_lengths))),
        keys=max(128, _round_up(max(span.run.key_lengths))),
        total_queries=_multiple(len(query)),
        total_keys=_multiple(len(key)),
        heads=query.shape[1],
        groups=key.shape[1],
        head_dim=query.shape[2],
        is_square=span.is_square,
        is_causal=span.is_causal,
        is_single=False,
        dtype=query.dtype,
        scale=scale,
    )


def _fill(rows: Tensor, missing: int) -> Tensor:
    return functional.pad(rows, (0, 0, 0, 0, 0, missing)) if missing else rows


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _multiple(tokens: int) -> int:
    return -(-tokens // _TOKENS) * _TOKENS


def _layout(span: PackedSpan, shape: GraphShape) -> Layout:
    missing = shape.documents - len(span.run.query_lengths)

    def offsets(cumulated: Tensor, elements: int) -> Tensor:
        padded = torch.cat([cumulated, cumulated[-1:].expand(missing)])
        return (padded * elements).to(torch.int32).view(-1, 1, 1, 1)

    def lengths(cumulated: Tensor) -> Tensor:
        padded = torch.cat([cumulated, cumulated[-1:].expand(missing)])
        return padded.diff().view(-1, 1, 1, 1)

    return {
        "ragged_q": offsets(span.cu_queries, shape.heads * shape.head_dim),
        "ragged_k": offsets(span.cu_keys, shape.groups * shape.head_dim),
        "ragged_stats": offsets(span.cu_queries, shape.heads),
        "len_q": lengths(span.cu_queries),
        "len_k": lengths(span.cu_keys),
    }


class _CudnnFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention: CudnnAttention,
        shape: GraphShape,
        layout: Layout,
    ) -> Tensor:
        out = torch.empty_like(query)
        stats = query.new_empty(query.shape[0] * query.shape[1], dtype=torch.float32)
        attention.execute(
            shape,
            backward=False,
            tensors={"q": query, "k": key, "v": value, "o": out, "stats": stats} | layout,
        )
        ctx.save_for_backward(query, key, value, out, stats)
        ctx.rest = attention, shape, layout
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        query, key, value, out, stats = ctx.saved_tensors
        attention, shape, layout = ctx.rest
        grads = tuple(torch.empty_like(x) for x in (query, key, value))
        attention.execute(
            shape,
            backward=True,
            tensors={"q": query, "k": key, "v": value, "o": out, "stats": stats}
            | {"do": grad.contiguous()}
            | dict(zip(("dq", "dk", "dv"), grads, strict=True))
            | layout,
        )
        return *grads, None, None, None


def _build(shape: GraphShape, handle: Any, *, backward: bool) -> Graph:  # noqa: ANN401
    import cudnn

    dtype = cudnn.data_type.BFLOAT16 if shape.dtype is torch.bfloat16 else cudnn.data_type.HALF
    f32, i32 = cudnn.data_type.FLOAT, cudnn.data_type.INT32
    graph = cudnn.pygraph(
        io_data_type=dtype, intermediate_data_type=f32, compute_data_type=f32, handle=handle
    )
    b, d = shape.documents, shape.head_dim
    sizes = {"ragged_q": b + 1, "ragged_k": b + 1, "ragged_stats": b + 1, "len_q": b, "len_k": b}
    places: dict[str, Any] = {
        name: graph.tensor(name=name, dim=[n, 1, 1, 1], stride=[1, 1, 1, 1], data_type=i32)
        for name, n in sizes.items()
        if not shape.is_single
    }

    def of(heads: int, length: int) -> dict[str, list[int]]:
        return {
            "dim": [b, heads, length, d],
            "stride": [length * heads * d, d, heads * d, 1],
        }

    queries, keys = of(shape.heads, shape.queries), of(shape.groups, shape.keys)
    # Token by token where documents are packed, else head by head: cuDNN takes no other.
    inner = [shape.queries, 1] if shape.is_single else [1, shape.heads]
    stats_of = {
        "dim": [b, shape.heads, shape.queries, 1],
        "stride": [shape.queries * shape.heads, *inner, 1],
    }

    def given(name: str, where: dict[str, list[int]], ragged: str, kind: Any = dtype) -> Any:  # noqa: ANN401
        tensor = graph.tensor(name=name, data_type=kind, **where)
        if ragged in places:
            tensor.set_ragged_offset(places[ragged])
        return tensor

    def declare_output(tensor: Any, where: dict[str, list[int]], ragged: str) -> Any:  # noqa: ANN401
        tensor.set_output(True).set_dim(where["dim"]).set_stride(where["stride"])
        if ragged in places:
            tensor.set_ragged_offset(places[ragged])
        return tensor

    tensors = {
        "q": given("q", queries, "ragged_q"),
        "k": given("k", keys, "ragged_k"),
        "v": given("v", keys, "ragged_k"),
    }
    options: dict[str, Any] = {"attn_scale": shape.scale}
    if shape.is_causal:
        options["use_causal_mask" if shape.is_square else "use_causal_mask_bottom_right"] = True
    if not shape.is_single:
        options |= {"use_padding_mask": True, "seq_len_q": places["len_q"],
                    "seq_len_kv": places["len_k"]}  # fmt: skip
    totals = {"max_total_seq_len_q": shape.total_queries, "max_total_seq_len_kv": shape.total_keys}
    if backward:
        tensors |= {
            "o": given("o", queries, "ragged_q"),
            "do": given("do", queries, "ragged_q"),
            "stats": given("stats", stats_of, "ragged_stats", f32),
        }
        dq, dk, dv = graph.sdpa_backward(
            name="backward", q=tensors["q"], k=tensors["k"], v=tensors["v"], o=tensors["o"],
            dO=tensors["do"], stats=tensors["stats"],
            **({} if shape.is_single else totals), **options,
        )  # fmt: skip
        tensors |= {
            "dq": declare_output(dq, queries, "ragged_q"),
            "dk": declare_output(dk, keys, "ragged_k"),
            "dv": declare_output(dv, keys, "ragged_k"),
        }
    else:
        out, stats = graph.sdpa(
            name="forward", q=tensors["q"], k=tensors["k"], v=tensors["v"], is_inference=False,
            **options,
        )  # fmt: skip
        tensors |= {
            "o": declare_output(out, queries, "ragged_q"),
            "stats": declare_output(stats, stats_of, "ragged_stats").set_data_type(f32),
        }
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return Graph(graph, tensors | places, max(1, graph.get_workspace_size()))


def of_towers(attend: AttentionKernel) -> towers.TowerAttentionKernel:
    """Returns the kernel for the encoders of a model whose text uses `attend`."""
    return _ByCudnn(attend) if isinstance(attend, CudnnAttention) else towers.attend


class _ByCudnn:
    """Treats every segment as a document with full attention."""

    def __init__(self, attend: CudnnAttention) -> None:
        self._attend = attend
        self._takes: dict[int, bool] = {}

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: SequenceOffsets
    ) -> Tensor:
        channels = query.shape[-1]
        span, scale = _span(lengths, len(query)), 1 / math.sqrt(channels)
        if channels not in self._takes:
            self._takes[channels] = self._attend.takes(query, key, span, scale)
        if not self._takes[channels]:
            return towers.attend(query, key, value, lengths)
        return self._attend(query, key, value, span, scale)


def _span(lengths: SequenceOffsets, rows: int) -> PackedSpan:
    if "span" not in lengths.made:
        run = PackedRange((0, rows), (0, rows), lengths.rows, lengths.rows)
        ends = lengths.cu_seqlens
        lengths.made["span"] = PackedSpan(run, ends, ends, is_causal=False)
    return cast(PackedSpan, lengths.made["span"])
