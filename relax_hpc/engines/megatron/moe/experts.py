"""The experts of this rank: two products per expert over the rows it is sent, as grouped products.

M = rows sent to this rank's experts, ordered by expert; E = experts of this rank; h = hidden size;
f = feed-forward channels of an expert on this rank. Without a GPU, or for other types than
bfloat16, a group is a product of its own.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn import functional

from relax_hpc.devices import sent
from relax_hpc.engines.megatron.layers.gradient_fusion import add_product


class Groups(NamedTuple):
    """Rows of each expert, one after the other."""

    counts: tuple[int, ...]
    ends: Tensor
    """[E] int32, on the device."""

    @classmethod
    def of(cls, counts: tuple[int, ...], device: torch.device) -> "Groups":
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
        return cls(counts, sent(ends, device))


class Experts(MegatronModule):  # type: ignore[misc]
    """Megatron's experts of an MoE layer, with the weights of all of them in two tensors."""

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
        tokens_per_expert: Groups | Tensor,
        weights: Tensor,
        again: Callable[[], Tensor] | None = None,
    ) -> tuple[Tensor, None]:
        """[M, h] -> [M, h], this rank's part of the sum over expert-tensor-parallel ranks; no bias.

        Args:
            weights: [M] float32, of the router.
            again: how to make `rows` again for the gradient; then nothing of size M is kept.
        """
        groups = tokens_per_expert
        if not isinstance(groups, Groups):
            groups = Groups.of(tuple(groups.tolist()), rows.device)
        return _experts(rows, weights, self.weight1, self.weight2, groups, again), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, ShardedTensor]:
        """Split by expert and by feed-forward channel: loads at any expert-parallel layout."""
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
        groups: Groups,
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


def product(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """[M, in], [E, out, in] -> [M, out], every row with its group's matrix."""
    if rows.is_cuda and rows.dtype == torch.bfloat16 and len(rows):
        out: Tensor = functional.grouped_mm(rows, matrices.transpose(1, 2), offs=groups.ends)
        return out
    parts = torch.split(rows, list(groups.counts))
    return torch.cat([part @ matrix.t() for part, matrix in zip(parts, matrices, strict=True)])


def weight_gradient(weight: Tensor, grad: Tensor, rows: Tensor, groups: Groups) -> Tensor:
    """Gradient of a stacked weight [E, ..., in] with the product of [M, out] and [M, in].

    It is added to the weight's `main_grad`, where Megatron has given it one; what is returned then
    has the shape autograd wants, and no meaning.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        out = torch.zeros_like(weight, dtype=torch.float32)
        _add_products(out.view(len(weight), -1, rows.shape[1]), grad, rows, groups)
        return out.to(weight.dtype)
    _add_products(main_grad.view(len(weight), -1, rows.shape[1]), grad, rows, groups)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


def _add_products(totals: Tensor, grad: Tensor, rows: Tensor, groups: Groups) -> None:
    """totals[e] += grad[of e].T @ rows[of e]."""
    lefts, rights = torch.split(grad, list(groups.counts)), torch.split(rows, list(groups.counts))
    for total, left, right in zip(totals, lefts, rights, strict=True):
        if len(left):
            add_product(total, left.t(), right)


def weighted_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    """[M, 2 f], gate then up, and [M] -> [M, f]."""
    if gate_up.is_cuda:
        from relax_hpc.engines.megatron.moe import kernels as kernels_moe

        return kernels_moe.weighted_swiglu(gate_up, weights)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up * weights[:, None]).to(gate_up.dtype)


def weighted_swiglu_backward(
    gate_up: Tensor, weights: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The output again [M, f], and the gradients of `gate_up` and of `weights`."""
    if gate_up.is_cuda:
        from relax_hpc.engines.megatron.moe import kernels as kernels_moe

        return kernels_moe.weighted_swiglu_backward(gate_up, weights, grad)
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    wide = grad.float()
    weights_grad = (wide * silu * up).sum(-1).to(weights.dtype)
    activated = (silu * up * weights[:, None]).to(gate_up.dtype)
    wide = wide * weights[:, None]
    gate_grad = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    return activated, torch.cat([gate_grad, wide * silu], -1).to(gate_up.dtype), weights_grad
