"""Computes layers of experts on stock Megatron-core, with our own router, dispatch and experts.

t = tokens of this rank, h = hidden size, E = experts, L of them on a rank; G = ranks that share
them: expert parallel x expert-tensor parallel. A token goes to a rank once, however many of its
experts are there, and comes back as one partial sum: with 8 experts per token on 4 ranks that is
less than half the volume of one copy per expert. Ranks of an expert-tensor-parallel group get the
same tokens, and their partial sums add up like those of other ranks.

Moves copy n rows to m places, at most k each, and sum the copies on the way back. No sum uses
atomic additions: the same rows give the same bits.

A rank's experts are two grouped matrix products over the M rows sent to them, ordered by expert; f
= feed-forward channels of an expert on this rank. Without a GPU, or for dtypes other than bfloat16,
each group is a product of its own.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from torch import Tensor, nn
from torch.nn import functional

from relax_hpc.errors import ConfigError
from relax_hpc.runtime.devices import send
from relax_hpc.trainer.megatron.layers import dense
from relax_hpc.trainer.megatron.layers.attention import PackedRows
from relax_hpc.trainer.megatron.layers.dense import PackedLayer
from relax_hpc.trainer.megatron.layers.gradient_fusion import add_product
from relax_hpc.trainer.megatron.layers.router import PackedRouter


class ExpertRows(NamedTuple):
    """Rows of each expert, one after the other."""

    counts: tuple[int, ...]
    ends: Tensor
    """[E] int32, on the device."""

    @classmethod
    def of(cls, counts: tuple[int, ...], device: torch.device) -> "ExpertRows":
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
        return cls(counts, send(ends, device))


class Experts(MegatronModule):  # type: ignore[misc]
    """Megatron's experts of an MoE layer, with all weights in two tensors."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self._ep, self._etp = pg_collection.ep, pg_collection.expt_tp
        self._replica = pg_collection.expt_dp
        width = config.moe_ffn_hidden_size // self._etp.size()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        shapes = {
            "weight1": (num_local_experts, 2, width, config.hidden_size),  # gate, then up
            "weight2": (num_local_experts, config.hidden_size, width),
        }
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
            # Every rank's part counts in the gradient's norm; expert data parallelism sums it.
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            weight.allreduce = False  # type: ignore[attr-defined]
            self.register_parameter(name, weight)
        if config.perform_initialization:
            self._initialize(config)

    def _initialize(self, config: TransformerConfig) -> None:
        first, second = config.init_method, config.output_layer_init_method
        for weight, draw in ((self.weight1, first), (self.weight2, second)):
            if config.use_cpu_initialization:
                draw(weight)
                continue
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                draw(weight)

    def forward(
        self,
        rows: Tensor,
        tokens_per_expert: ExpertRows | Tensor,
        weights: Tensor,
        again: Callable[[], Tensor] | None = None,
    ) -> tuple[Tensor, None]:
        """[M, h] -> [M, h], this rank's part of the sum over expert-tensor-parallel ranks; no bias.

        Args:
            weights: [M] float32, of the router.
            again: recomputes `rows` for the gradient; then nothing of size M is kept.
        """
        groups = tokens_per_expert
        if not isinstance(groups, ExpertRows):
            groups = ExpertRows.of(tuple(groups.tolist()), rows.device)
        return _experts(rows, weights, self.weight1, self.weight2, groups, again), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, ShardedTensor]:
        """Splits by expert and by feed-forward channel: loads at any expert-parallel layout."""
        del metadata
        layers = len(sharded_offsets)
        replica = (0, 0, self._replica.rank())
        ep, etp = (self._ep.rank(), self._ep.size()), (self._etp.rank(), self._etp.size())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}", weight, *sharded_offsets, (layers, *ep),
                (layers + 2, *etp), prepend_axis_num=layers, replica_id=replica,
            )
            for name, weight in (("weight1", self.weight1), ("weight2", self.weight2))
        }  # fmt: skip


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        rows: Tensor,
        weights: Tensor,
        weight1: Tensor,
        weight2: Tensor,
        groups: ExpertRows,
        again: Callable[[], Tensor] | None,
    ) -> Tensor:
        gate_up = product(rows, weight1.flatten(1, 2), groups)
        kept = (None, None) if again else (rows, gate_up)
        ctx.save_for_backward(weights, weight1, weight2, *kept)
        ctx.groups, ctx.again = groups, again
        return product(weighted_swiglu(gate_up, weights), weight2, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        weights, weight1, weight2, rows, gate_up = ctx.saved_tensors
        groups, first = ctx.groups, weight1.flatten(1, 2)
        if ctx.again is not None:
            rows = ctx.again()
            gate_up = product(rows, first, groups)
        grad = grad.contiguous()
        activated_grad = product(grad, weight2.transpose(1, 2), groups)
        activated, gate_up_grad, weights_grad = weighted_swiglu_backward(
            gate_up, weights, activated_grad
        )
        del activated_grad, gate_up
        weight2_grad = weight_gradient(weight2, grad, activated, groups)
        del activated
        weight1_grad = weight_gradient(weight1, gate_up_grad, rows, groups)
        del rows
        rows_grad = product(gate_up_grad, first.transpose(1, 2), groups)
        return rows_grad, weights_grad, weight1_grad, weight2_grad, None, None


_experts: Callable[..., Tensor] = _Experts.apply


def product(rows: Tensor, matrices: Tensor, groups: ExpertRows) -> Tensor:
    """[M, in], [E, out, in] -> [M, out], every row with its group's matrix."""
    if rows.is_cuda and rows.dtype == torch.bfloat16 and len(rows):
        out: Tensor = functional.grouped_mm(rows, matrices.transpose(1, 2), offs=groups.ends)
        return out
    parts = torch.split(rows, list(groups.counts))
    return torch.cat([part @ matrix.t() for part, matrix in zip(parts, matrices, strict=True)])


def weight_gradient(weight: Tensor, grad: Tensor, rows: Tensor, groups: ExpertRows) -> Tensor:
    """Returns the gradient of a stacked weight [E, ..., in] for the product of [M, out] and [M,
    in].

    It is added to the weight's `main_grad`, if Megatron has made one; the result then only has the
    shape that autograd needs.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        out = torch.zeros_like(weight, dtype=torch.float32)
        _add_products(out.view(len(weight), -1, rows.shape[1]), grad, rows, groups)
        return out.to(weight.dtype)
    _add_products(main_grad.view(len(weight), -1, rows.shape[1]), grad, rows, groups)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


def _add_products(totals: Tensor, grad: Tensor, rows: Tensor, groups: ExpertRows) -> None:
    """totals[e] += grad[of e].T @ rows[of e]."""
    lefts, rights = torch.split(grad, list(groups.counts)), torch.split(rows, list(groups.counts))
    for total, left, right in zip(totals, lefts, rights, strict=True):
        if len(left):
            add_product(total, left.t(), right)


def weighted_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    """[M, 2 f], gate then up, and [M] -> [M, f]."""
    if gate_up.is_cuda:
        from relax_hpc.trainer.megatron.layers import kernels

        return kernels.weighted_swiglu(gate_up, weights)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up * weights[:, None]).to(gate_up.dtype)


def weighted_swiglu_backward(
    gate_up: Tensor, weights: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output again [M, f], and the gradients of `gate_up` and of `weights`."""
    if gate_up.is_cuda:
        from relax_hpc.trainer.megatron.layers import kernels

        return kernels.weighted_swiglu_backward(gate_up, weights, grad)
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    wide = grad.float()
    weights_grad = (wide * silu * up).sum(-1).to(weights.dtype)
    activated = (silu * up * weights[:, None]).to(gate_up.dtype)
    wide = wide * weights[:, None]
    gate_grad = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    return activated, torch.cat([gate_grad, wide * silu], -1).to(gate_up.dtype), weights_grad


class Moves(NamedTuple):
    """A map from rows to places, and back."""

    row: Tensor
    """[m] int64, the row copied to each place."""
    destination: Tensor
    """[m] int64, ascending."""
    places: Tensor
    """[n, k] int64, places of a row's copies; -1 for none."""


def moves(goes: Tensor, count: int, most: int) -> Moves:
    """Returns copies ordered by destination, then by row.

    Args:
        goes: [n, destinations] bool.
        count: number of True ones; known before, to avoid waiting for the device.
    """
    num_rows = max(len(goes), 1)
    by_destination = goes.t().reshape(-1)
    flat = torch.nonzero_static(by_destination, size=count)[:, 0]
    row = flat % num_rows
    nth = goes.cumsum(1, dtype=torch.int32).t().reshape(-1)[flat] - 1  # of the row's destinations
    places = flat.new_full((len(goes) * most,), -1)
    places[row * most + nth] = torch.arange(count, device=flat.device)
    return Moves(row, flat // num_rows, places.view(len(goes), most))


def spread(rows: Tensor, moves: Moves) -> Tensor:
    """[n, h] -> [m, h], copies."""
    return _spread(rows, moves)


def collect(copies: Tensor, moves: Moves) -> Tensor:
    """[m, h] -> [n, h], the sum of a row's copies; float32 inside, 0 for none."""
    return _collect(copies, moves)


def take(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], without gradient."""
    if rows.is_cuda:
        from relax_hpc.trainer.megatron.layers import kernels

        return kernels.take_rows(rows.contiguous(), index)
    return rows.index_select(0, index)


def total(copies: Tensor, places: Tensor) -> Tensor:
    """[n, h] sums of the copies at `places`, without gradient."""
    if copies.is_cuda:
        from relax_hpc.trainer.megatron.layers import kernels

        return kernels.sum_rows(copies.contiguous(), places)
    if not len(copies):
        return copies.new_zeros(len(places), copies.shape[1])
    found = copies[places.clamp(min=0)].float().where((places >= 0)[..., None], 0.0)
    return found.sum(1).to(copies.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, moves: Moves) -> Tensor:  # noqa: ANN401
        ctx.moves = moves
        return take(rows, moves.row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return total(grad, ctx.moves.places), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, moves: Moves) -> Tensor:  # noqa: ANN401
        ctx.moves = moves
        return total(copies, moves.places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return take(grad, ctx.moves.row), None


_spread: Callable[[Tensor, Moves], Tensor] = _Spread.apply
_collect: Callable[[Tensor, Moves], Tensor] = _Collect.apply


class ExpertSharing(NamedTuple):
    """The ranks that share the experts; expert-tensor-parallel ones are neighbours."""

    group: dist.ProcessGroup
    expert_parallel: int

    @property
    def expert_tensor_parallel(self) -> int:
        return self.group.size() // self.expert_parallel


class RowExchange(NamedTuple):
    """Rows sent to and received from each rank."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: dist.ProcessGroup

    @property
    def reverse(self) -> "RowExchange":
        return RowExchange(self.received, self.sent, self.group)


@dataclass(frozen=True)
class Dispatch:
    """The moves of one forward's tokens to experts."""

    outward: Moves | None
    """Tokens to ranks; None with one rank."""
    exchange: RowExchange
    inward: Moves
    """Rows that arrived, to this rank's experts."""
    weights: Tensor
    """[M] float32 of the router, with gradient, for the M rows of this rank's experts."""
    groups: ExpertRows

    def send(self, rows: Tensor) -> Tensor:
        """[t, h] -> [M, h], ordered by expert; with gradient."""
        if self.outward is not None:
            rows = exchange_rows(spread(rows, self.outward), self.exchange)
        return spread(rows, self.inward)

    def send_again(self, rows: Tensor) -> Tensor:
        """Does as `send` without gradient; collective again."""
        if self.outward is not None:
            rows = _all_to_all(take(rows, self.outward.row), self.exchange)
        return take(rows, self.inward.row)

    def back(self, rows: Tensor) -> Tensor:
        """[M, h] -> [t, h], summed over experts."""
        rows = collect(rows, self.inward)
        if self.outward is None:
            return rows
        return collect(exchange_rows(rows, self.exchange.reverse), self.outward)


def plan(
    weights: Tensor, chosen: Tensor, sharing: ExpertSharing, *, per_token: int, to_all: bool = False
) -> Dispatch:
    """Computes the moves. Waits for the device once.

    Args:
        weights: [t, E] float32, of the router, with gradient; at least 0 where chosen.
        chosen: [t, E] bool.
        per_token: most experts of a token.
        to_all: whether every token goes to every rank.
    """
    size, tokens = sharing.group.size(), len(chosen)
    marked = weights.where(chosen, -1.0).view(tokens, sharing.expert_parallel, -1)
    local = marked.shape[2]
    goes = chosen.new_ones(tokens, size)
    if not to_all:
        goes = chosen.view(marked.shape).any(2)
        goes = goes.repeat_interleave(sharing.expert_tensor_parallel, dim=1)
    table = _table(torch.cat([goes.sum(0), chosen.sum(0)]), sharing.group)
    me = sharing.group.rank()
    exchange = RowExchange(table[me][:size], tuple(row[me] for row in table), sharing.group)
    first = size + me // sharing.expert_tensor_parallel * local
    counts = tuple(map(sum, zip(*(row[first : first + local] for row in table), strict=True)))
    outward = None
    arrived = marked.view(tokens, -1)
    if size > 1:
        outward = moves(goes, sum(exchange.sent), size)
        owner = outward.destination // sharing.expert_tensor_parallel
        part = outward.row * sharing.expert_parallel + owner
        arrived = exchange_rows(marked.view(-1, local).index_select(0, part), exchange)
    inward = moves(arrived >= 0, sum(counts), min(per_token, local))
    flat = inward.row * local + inward.destination
    return Dispatch(
        outward, exchange, inward,
        arrived.reshape(-1).index_select(0, flat), ExpertRows.of(counts, chosen.device),
    )  # fmt: skip


def _table(numbers: Tensor, group: dist.ProcessGroup) -> Sequence[tuple[int, ...]]:
    table = numbers.new_empty(group.size(), len(numbers))
    dist.all_gather(list(table), numbers, group=group)
    return [tuple(row) for row in table.tolist()]


def exchange_rows(rows: Tensor, exchange: RowExchange) -> Tensor:
    """[sum of sent, ...] -> [sum of received, ...], with gradient."""
    return _exchange(rows, exchange)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange) -> Tensor:  # noqa: ANN401
        ctx.exchange = exchange
        return _all_to_all(rows, exchange)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _all_to_all(grad, ctx.exchange.reverse), None


_exchange: Callable[[Tensor, RowExchange], Tensor] = _Exchange.apply


def _all_to_all(rows: Tensor, exchange: RowExchange) -> Tensor:
    sent, received = list(exchange.sent), list(exchange.received)
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=exchange.group)
    return out


def with_experts(layer: ModuleSpec) -> ModuleSpec:
    layer.module = ExpertLayer
    layer.submodules.mlp = ModuleSpec(
        module=MoELayer, submodules=MoESubmodules(experts=Experts, router=PackedRouter)
    )
    return layer


class ExpertLayer(PackedLayer):
    """Passes the tokens' documents and replayed routes to its router."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        assert type(self.mlp) is MoELayer
        self.mlp.__class__ = PackedMoE  # Megatron warns of other classes in the specification

    def forward(self, *args: Any, packed_seq_params: PackedRows, **kwargs: Any) -> Any:  # noqa: ANN401
        self.mlp.router.documents = packed_seq_params.documents
        self.mlp.router.routes = packed_seq_params.routes
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


def check_installed(config: TransformerConfig) -> None:
    """Checks that the dispatcher is installed.

    Raises:
        ConfigError: DeepEP is configured and missing.
    """
    if config.num_moe_experts is None or config.moe_token_dispatcher_type != "flex":
        return
    if not importlib.util.find_spec("deep_ep"):
        raise ConfigError(
            'actor.transformer.moe_token_dispatcher_type = "flex": needs the package deep_ep '
            '(DeepEP), which is not installed; use "alltoall" or "allgather"'
        )


class PackedMoE(MoELayer):  # type: ignore[misc]
    """Megatron's, with `Dispatch` for both its "alltoall" and its "allgather".

    With `recompute_modules = ["moe"]` only the layer's input is kept. For the gradient tokens are
    sent again and the first product is recomputed, but not the second product and the way back.
    "moe_act" is always on: a product's input is recomputed from what is kept anyway.
    """

    recompute_norm = True

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: None = None,
        padding_mask: None = None,
    ) -> tuple[Tensor, None]:
        """[t, 1, h] -> [t, 1, h]; no bias."""
        kind = self.config.moe_token_dispatcher_type
        if kind == "flex":
            out: tuple[Tensor, None] = super().forward(hidden_states)
            return out
        with dense.drop_input(hidden_states, self.recompute_norm):
            weights, chosen = self.router(hidden_states)
        found = plan(
            weights, chosen,
            ExpertSharing(self.token_dispatcher.tp_ep_group, self.ep_group.size()),
            per_token=self.config.moe_router_topk, to_all=kind == "allgather",
        )  # fmt: skip
        again: Callable[[], Tensor] | None = None
        if self.moe_layer_recompute and torch.is_grad_enabled():
            again = partial(_send_again, found, dense.make_again(hidden_states))
        sent = found.send(hidden_states.flatten(0, 1))
        rows, _ = self.experts(sent, found.groups, found.weights, again)
        return found.back(rows).view_as(hidden_states), None


def _send_again(found: Dispatch, hidden: Callable[[], Tensor]) -> Tensor:
    return found.send_again(hidden().flatten(0, 1))
