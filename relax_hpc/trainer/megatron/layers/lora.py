"""Low-rank adaptation (LoRA, arXiv:2106.09685): frozen matrices plus the product of two thin ones.

A layer computes with the matrix that engines get, W + alpha / rank B A, added in float32 and
rounded once: the trainer's policy equals the sampling one, bit by bit. It is merged when needed,
and not kept; the gradient goes to A and B alone, without one of the matrix. T = tokens of this
rank, n = rank of all matrices that a layer is packed from.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from relax_hpc.config.model import LoraConfig
from relax_hpc.trainer.models.names import Adapter, Layout, Parameter


class _Adapted(nn.Module):
    weight: nn.Parameter
    bias: nn.Parameter | None
    skip_bias_add: bool
    tp_group: dist.ProcessGroup
    lora_a: nn.Parameter
    """[n, in] float32, or this rank's columns of it."""
    lora_b: nn.Parameter
    """[out, rank] float32, or this rank's rows of it."""
    places: Tensor
    """[out, matrices] the scale if a row belongs to a matrix, else 0."""
    layout: Layout

    def merge_adapter(self) -> Tensor:
        """Returns the matrix that the layer computes with."""
        with torch.no_grad():
            return merge(self.weight, spread(self.lora_b, self.places), self.lora_a)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Does as Megatron's layers, with the adapter."""
        axes = {"weight": 1, "lora_a": 1}
        if self.layout != "columns":
            axes = {"weight": 0, "bias": 0, "lora_b": 0}
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, axes, sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=(metadata or {})["dp_cp_group"],
        )  # fmt: skip
        if self.layout == "gate_up":  # as Megatron does with the matrix itself
            name = f"{prefix}lora_b"
            found[name] = apply_swiglu_sharded_factory(found[name], sharded_offsets)
        return found


class AdaptedColumns(_Adapted, ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's column-parallel layer, whose ranks have rows of the matrix."""

    def forward(
        self,
        hidden: Tensor,
        weight: None = None,
        runtime_gather_output: None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, in] -> [T x ranks, 1, out / ranks], and the bias if the caller adds it."""
        group = self.tp_group if self.tp_group.size() > 1 else None
        out = _product(hidden, self.weight, self.lora_b, self.lora_a, self.places, group)
        if self.bias is None or self.skip_bias_add:
            return out, self.bias
        return out + self.bias, None


class AdaptedRows(_Adapted, RowParallelLinear):  # type: ignore[misc]
    """Megatron's row-parallel layer, whose ranks have columns of the matrix."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """[T x ranks, 1, in / ranks] -> [T, 1, out], and the bias."""
        out = _product(hidden, self.weight, self.lora_b, self.lora_a, self.places, None)
        if self.tp_group.size() > 1:
            out = reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        if self.bias is None or self.skip_bias_add:
            return out, self.bias
        return out + self.bias, None


def adapt(
    layer: nn.Module, parameter: Parameter, adapter: Adapter, lora: LoraConfig, seed: int
) -> None:
    """Adds an adapter to a layer of Megatron's, with peft's initial values; it changes nothing yet.

    Args:
        seed: of A; the values are the same on every grid.
    """
    group: dist.ProcessGroup = layer.tp_group  # type: ignore[assignment]
    rank, size, weight = group.rank(), group.size(), layer.weight
    layer.__class__ = AdaptedRows if parameter.layout == "columns" else AdaptedColumns
    assert isinstance(layer, _Adapted) and isinstance(weight, nn.Parameter)
    first, second = (
        torch.zeros(each.shard_shape(size), device=weight.device) for each in (adapter.a, adapter.b)
    )
    for piece in adapter.a.pieces(rank, size):
        whole = _initialise(seed, *list(adapter.a.hf.items())[piece.source])
        part = whole.narrow(piece.dim, piece.start, piece.length)
        first.narrow(piece.dim, piece.target, piece.length).copy_(part)
    layer.lora_a, layer.lora_b = nn.Parameter(first), nn.Parameter(second)
    layer.layout = parameter.layout
    places = places_of(parameter, adapter.sources, lora.scale, rank, size)
    layer.places = places.to(weight.device)
    shared, split = layer.lora_a, layer.lora_b
    if parameter.layout == "columns":
        shared, split = split, shared
    set_tensor_model_parallel_attributes(split, True, int(split is layer.lora_a), 1)
    # Each rank has a part of the sum over what is split: gradients are summed, as those of norms.
    shared.sequence_parallel = layer.config.sequence_parallel  # type: ignore[attr-defined, union-attr]
    weight.adapted_by = layer  # type: ignore[attr-defined]


def is_adapted(weight: nn.Parameter) -> bool:
    return hasattr(weight, "adapted_by")


def merge_adapter(weight: nn.Parameter) -> Tensor:
    """Returns the weights in use: a parameter, or the sum of one and its adapter."""
    layer: _Adapted | None = getattr(weight, "adapted_by", None)
    return weight.detach() if layer is None else layer.merge_adapter()


def set_to_nothing(chunks: Sequence[GPTModel]) -> None:
    """Zeroes the adapters' contribution."""
    for chunk in chunks:
        for layer in chunk.modules():
            if isinstance(layer, _Adapted):
                layer.lora_b.detach().zero_()


def merge(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Returns weight + left @ right in float32, rounded once to the weight's dtype."""
    if weight.dtype is torch.float32:
        return torch.addmm(weight, left, right)
    return weight.float().addmm_(left, right).to(weight.dtype)


def spread(factor: Tensor, places: Tensor) -> Tensor:
    """[out, rank] -> [out, matrices x rank]: a row times the scale at the A of its matrix.

    Args:
        places: see `places_of`.
    """
    return (factor[:, None, :] * places[:, :, None]).flatten(1)


def places_of(
    parameter: Parameter, sources: Sequence[int], scale: float, rank: int = 0, size: int = 1
) -> Tensor:
    """Returns [rows of a shard, sources] the scale if a row belongs to a matrix, else 0."""
    rows, *_ = parameter.shard_shape(size)
    if parameter.layout == "columns":
        return torch.full((rows, 1), scale)
    found = torch.zeros(rows, len(sources))
    for piece in parameter.pieces(rank, size):
        if piece.source in sources:
            column = sources.index(piece.source)
            found[piece.target : piece.target + piece.length, column] = scale
    return found


def _initialise(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns peft's initial A: Kaiming's uniform distribution with a = sqrt(5)."""
    stream = torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))
    made = torch.empty(shape)
    nn.init.kaiming_uniform_(made, a=math.sqrt(5), generator=stream)
    return made


class _Product(torch.autograd.Function):
    """Computes hidden @ merged.T, with gradients of hidden and of the two factors.

    Under sequence parallelism `hidden` is gathered first, and its gradient scattered.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        factor: Tensor,
        right: Tensor,
        places: Tensor,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, factor, right)
        ctx.places, ctx.group = places, group
        whole, ready = _gather(hidden, group)
        matrix = merge(weight, spread(factor, places), right)
        if ready is not None:
            ready.wait()
        return whole @ matrix.t()

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
    ) -> tuple[Tensor, None, Tensor, Tensor, None, None]:
        hidden, weight, factor, right = ctx.saved_tensors
        whole, ready = _gather(hidden, ctx.group)
        left = spread(factor, ctx.places)
        hidden_grad = grad @ merge(weight, left, right)
        if ready is not None:
            ready.wait()
        if ctx.group is None:
            by_hidden, summed = hidden_grad, None
        else:
            by_hidden = torch.empty_like(hidden)
            summed = dist.reduce_scatter_tensor(
                by_hidden, hidden_grad, group=ctx.group, async_op=True
            )
        rows, of_rows = whole.flatten(0, 1), grad.flatten(0, 1)
        narrow = rows @ right.t().to(rows.dtype)
        by_left = _wide_product(of_rows.t(), narrow).view(*ctx.places.shape, -1)
        by_factor = (by_left * ctx.places[:, :, None]).sum(1)
        narrow = of_rows @ left.to(rows.dtype)
        by_right = _wide_product(narrow.t(), rows)
        if summed is not None:
            summed.wait()
        return by_hidden, None, by_factor, by_right, None, None


def _gather(hidden: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, dist.Work | None]:
    """Returns the tokens of all ranks, and the pending work."""
    if group is None:
        return hidden, None
    whole = hidden.new_empty(group.size() * len(hidden), *hidden.shape[1:])
    return whole, dist.all_gather_into_tensor(
        whole, hidden.contiguous(), group=group, async_op=True
    )


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right in float32; on GPUs without rounding in between."""
    if left.is_cuda and left.dtype is not torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


_product: Callable[..., Tensor] = _Product.apply
