"""Packed attention by cuDNN's graphs, through the package nvidia-cudnn-frontend.

A graph is built for a padded number of documents and a padded longest one, and reused: documents
that are not there have length 0 and cost nothing, and a new mix seldom needs a new graph. A single
document goes without padding mask and offsets, which is 6 % faster; the few tokens it is filled up
with lie behind it, where causal queries do not look.
"""

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from relax_hpc.engines.megatron.attention.packed_attention import Span

log = logging.getLogger(__name__)

_TOKENS = 4096
"""Total tokens are rounded up to a multiple: they only size the workspace."""
_SINGLE = 256
"""A single document is filled up to a multiple."""
_GRAPHS = 512
"""Graphs that are kept, the last ones used; another one takes 50 ms to build."""


class Shape(NamedTuple):
    """The sizes that a graph is built for; lengths and counts are upper bounds."""

    documents: int
    queries: int
    """Queries of a document."""
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
"""The places of a span's documents: offsets in elements of queries, keys and statistics,
[documents + 1, 1, 1, 1] int32, and lengths, [documents, 1, 1, 1] int32, padded with 0."""


class Graph(NamedTuple):
    graph: Any
    tensors: dict[str, Any]
    workspace_bytes: int


class CudnnAttention:
    """See `attention.Attend`. Keeps its graphs and one workspace; for one stream at a time."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[Shape, bool], Graph] = {}
        self._workspace: Tensor | None = None
        self._handle: Any = None
        self._refused: set[tuple[int, bool]] = set()
        """Head sizes, and whether causal, whose single documents cuDNN does not take as such."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, span: Span, scale: float
    ) -> Tensor:
        shape = _shape_of(query, key, span, scale)
        missing = -len(query) % _SINGLE
        is_single = len(span.run.query_lengths) == 1 and span.is_square
        if is_single and (span.is_causal or not missing):
            single = shape._replace(
                queries=len(query) + missing, keys=len(query) + missing, is_single=True
            )
            if self._takes(single):
                query, key, value = (_filled(x, missing) for x in (query, key, value))
                out = self._attend(query, key, value, single, {})
                return out[:-missing] if missing else out
        layout = span.cached("cudnn", lambda: _layout(span, shape))
        return self._attend(query, key, value, shape, layout)

    def _takes(self, single: Shape) -> bool:
        kind = (single.head_dim, single.is_causal)
        if kind not in self._refused and not self._can_build(single):
            self._refused.add(kind)
        return kind not in self._refused

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, shape: Shape, layout: Layout
    ) -> Tensor:
        apply = _Attention.apply
        out = apply(query.contiguous(), key.contiguous(), value.contiguous(), self, shape, layout)  # type: ignore[no-untyped-call]
        assert isinstance(out, Tensor)
        return out

    def takes(self, query: Tensor, key: Tensor, span: Span, scale: float) -> bool:
        """Tells whether this version of cuDNN has what such documents ask for."""
        return self._can_build(_shape_of(query, key, span, scale))

    def _can_build(self, shape: Shape) -> bool:
        import cudnn

        try:
            self._graph(shape, backward=False)
            self._graph(shape, backward=True)
        except cudnn.cudnnGraphNotSupportedError as error:
            log.warning("cuDNN does not take %s: %s", shape, error)
            return False
        return True

    def _graph(self, shape: Shape, *, backward: bool) -> Graph:
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

    def execute(self, shape: Shape, *, backward: bool, tensors: dict[str, Tensor]) -> None:
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


def _shape_of(query: Tensor, key: Tensor, span: Span, scale: float) -> Shape:
    return Shape(
        documents=_rounded(len(span.run.query_lengths)),
        queries=max(128, _rounded(max(span.run.query_lengths))),
        keys=max(128, _rounded(max(span.run.key_lengths))),
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


def _filled(rows: Tensor, missing: int) -> Tensor:
    return functional.pad(rows, (0, 0, 0, 0, 0, missing)) if missing else rows


def _rounded(count: int) -> int:
    """Rounds up to a power of two."""
    return 1 << (count - 1).bit_length()


def _multiple(tokens: int) -> int:
    return -(-tokens // _TOKENS) * _TOKENS


def _layout(span: Span, shape: Shape) -> Layout:
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


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention: CudnnAttention,
        shape: Shape,
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


def _build(shape: Shape, handle: Any, *, backward: bool) -> Graph:  # noqa: ANN401
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

    def wanted(tensor: Any, where: dict[str, list[int]], ragged: str) -> Any:  # noqa: ANN401
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
            "dq": wanted(dq, queries, "ragged_q"),
            "dk": wanted(dk, keys, "ragged_k"),
            "dv": wanted(dv, keys, "ragged_k"),
        }
    else:
        out, stats = graph.sdpa(
            name="forward", q=tensors["q"], k=tensors["k"], v=tensors["v"], is_inference=False,
            **options,
        )  # fmt: skip
        tensors |= {
            "o": wanted(out, queries, "ragged_q"),
            "stats": wanted(stats, stats_of, "ragged_stats").set_data_type(f32),
        }
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return Graph(graph, tensors | places, max(1, graph.get_workspace_size()))
