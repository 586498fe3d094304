"""Implements layers that Megatron-core lacks without Transformer Engine: norm, rotary, fused
blocks.

T = tokens of a packed micro-batch on this rank. Hidden states are [T, 1, h]: to Megatron-core a
micro-batch is one long sequence. Norm and SwiGLU outputs are not kept for the backward pass but
recomputed: a pass over memory instead of a third of all activations.

Norms, rotary positions and SwiGLU are each one pass over memory on GPUs, with hand-written
gradients, to control what is kept for the backward pass. Everything is float32 inside. The plain
torch here is the reference; on GPUs Triton kernels or torch's compiler take its place. d = channels
of a head.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from relax_hpc.runtime.devices import compile_on_gpu
from relax_hpc.trainer.megatron.layers.attention import PackedRows
from relax_hpc.trainer.models.rope import Rope
from relax_hpc.trainer.models.towers import rotate


class RMSNorm(nn.Module):
    """A norm as Hugging Face computes it (float32 inside), marked for sequence parallelism."""

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
        self.is_before_residual = False
        self._beside: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self._beside = None
        if self.is_before_residual and torch.is_grad_enabled():
            out, self._beside = rms_norm_beside(hidden, self.weight, self.eps)
        else:
            out = rms_norm(hidden, self.weight, self.eps)
        # The layer that is handed this very tensor need not keep it.
        out.again = partial(rms_norm, hidden.detach(), self.weight.detach(), self.eps)  # type: ignore[attr-defined]
        return out

    def past(self, hidden: Tensor) -> Tensor:
        """Returns the last call's input, to add as residual; see `rms_norm_beside`."""
        beside, self._beside = self._beside, None
        return hidden if beside is None else beside


class RotaryByPosition(nn.Module):
    """Rotary angles of explicit positions.

    Megatron's own module takes a length, not positions, and so cannot restart at each document.
    """

    inverse_frequencies: Tensor
    axes: Tensor

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        super().__init__()
        frequencies = rope.inverse_frequencies(head_dim, device)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)
        axes = torch.tensor(rope.axes(head_dim), device=device)
        self.register_buffer("axes", axes, persistent=False)

    def forward(self, position_ids: Tensor, *_: object, **__: object) -> Tensor:
        """[1, T] positions -> [T, 1, 1, head_dim] radians, the two halves alike.

        With [1, T, 3] positions in space, each channel pair uses its own axis.
        """
        if position_ids.ndim == 3:
            angles = position_ids[0, :, self.axes].float() * self.inverse_frequencies
        else:
            angles = position_ids[0, :, None].float() * self.inverse_frequencies
        return torch.cat([angles, angles], dim=-1)[:, None, None]


def residual_add(
    training: bool, fused: bool, *, past: Callable[[Tensor], Tensor] | None = None
) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """Replaces Megatron's `bias_dropout_add` for models without dropout, without a pass over
    memory.

    Args:
        past: of the norm in front of the block.
    """

    def add(out_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        assert prob == 0.0
        out, bias = out_with_bias
        residual = residual if past is None else past(residual)
        return residual + (out if bias is None else out + bias)

    return add


class FusedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's, with the norms (if any) and rotation of queries and keys fused in one pass."""

    recompute_norm = True

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None,
        *args: Any,  # noqa: ANN401
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedRows,
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, h] -> [T, 1, h] and the projection's bias."""
        rows = packed_seq_params
        if self.config.num_query_groups < self.world_size:
            out: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=rows, **kwargs,
            )  # fmt: skip
            return out
        with drop_input(hidden_states, self.recompute_norm):
            mixed, _ = self.linear_qkv(hidden_states)
        if rows.rotation is None:
            angles = rotary_pos_emb[:, 0, 0, : rotary_pos_emb.shape[-1] // 2]
            rows.rotation = torch.stack([angles.cos(), angles.sin()], dim=1)
        query, key, value = self._turn(
            mixed.view(
                len(mixed), self.num_query_groups_per_partition, -1,
                self.hidden_size_per_attention_head,
            ),
            rows.rotation,
        )  # fmt: skip
        core = self.core_attention(
            query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), None, packed_seq_params=rows
        )
        projected: tuple[Tensor, Tensor | None] = self.linear_proj(core)
        return projected

    def _turn(self, mixed: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, query groups, n + 2, d]: n queries, a key and a value -> [T, heads, d] of each."""
        if isinstance(self.q_layernorm, RMSNorm):
            return norm_and_rotate(
                mixed, self.q_layernorm.weight, self.k_layernorm.weight, rotation,
                self.q_layernorm.eps,
            )  # fmt: skip
        query, key, value = torch.split(mixed, [mixed.shape[2] - 2, 1, 1], dim=2)
        return (
            rotate(query, rotation).flatten(1, 2),
            rotate(key.squeeze(2), rotation),
            value.squeeze(2),
        )


class FusedMLP(MLP):  # type: ignore[misc]
    """Megatron's, with SwiGLU in one pass; with `recompute`, the first product is recomputed,
    too."""

    recompute = False
    recompute_norm = True
    recompute_swiglu = True

    def forward(
        self,
        hidden_states: Tensor,
        per_token_scale: Tensor | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, h] -> [T, 1, h] and the second layer's bias."""
        if per_token_scale is not None or not _is_swiglu(self.config):
            out: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, per_token_scale, **kwargs
            )
            return out
        with drop_input(hidden_states, self.recompute_norm):
            gate_up, _ = self.linear_fc1(hidden_states)
        if self.recompute and torch.is_grad_enabled():
            hidden_again = make_again(hidden_states)
            gate_up_again = _Twice(lambda: self.linear_fc1(hidden_again())[0].detach())
            with recompute(gate_up, gate_up_again):
                activated = swiglu(gate_up)
        else:
            kept = gate_up.detach()
            gate_up_again = _Twice(lambda: kept)
            activated = swiglu(gate_up)
        with (
            recompute(activated, lambda: swiglu(gate_up_again()))
            if self.recompute or self.recompute_swiglu
            else nullcontext()
        ):
            projected: tuple[Tensor, Tensor | None] = self.linear_fc2(activated)
        return projected


class _Twice:
    """Makes a tensor on first use and frees it after the second."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._made: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._made is None:
            self._made = self._make()
            return self._made
        made, self._made = self._made, None
        return made


class PackedLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's; `recompute_modules = ["mlp"]` repeats one product of the MLP instead of both."""

    recompute_mlp: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        for norm in (self.input_layernorm, self.pre_mlp_layernorm):
            norm.is_before_residual = True
        self.self_attn_bda = partial(residual_add, past=self.input_layernorm.past)
        self.mlp_bda = partial(residual_add, past=self.pre_mlp_layernorm.past)
        if type(self.mlp) is MLP:  # Megatron warns of other classes in the specification
            self.mlp.__class__ = FusedMLP
            self.mlp.recompute = self.recompute_mlp
            self.recompute_mlp = False

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:  # noqa: ANN401
        """Does as Megatron's; adds features of media to the first layers' outputs."""
        hidden, context = super().forward(*args, **kwargs)
        seen = kwargs["packed_seq_params"].seen
        if seen is not None:
            hidden = seen.beside(hidden, self.layer_number - 1)
        return hidden, context


def set_recomputed(model: nn.Module, passes: Collection[str]) -> None:
    """Sets which outputs are recomputed for the gradient: "norm", "swiglu"."""
    for module in model.modules():
        if hasattr(module, "recompute_norm"):  # experts, too
            setattr(module, "recompute_norm", "norm" in passes)  # noqa: B010
        if isinstance(module, FusedMLP):
            module.recompute_swiglu = "swiglu" in passes


def drop_input(hidden: Tensor, enabled: bool) -> AbstractContextManager[None]:
    """Keeps no `hidden` for the gradient within the block, if it can be recomputed."""
    return recompute(hidden, make_again(hidden)) if enabled else nullcontext()


def make_again(hidden: Tensor) -> Callable[[], Tensor]:
    """Returns a function that recomputes it, if a norm made it; else it is kept."""
    kept = hidden.detach()
    again: Callable[[], Tensor] = getattr(hidden, "again", lambda: kept)
    return again


def _is_swiglu(config: Any) -> bool:  # noqa: ANN401
    return (
        config.gated_linear_unit
        and config.activation_func is functional.silu
        and config.activation_func_clamp_value is None
        and not config.add_bias_linear
    )


def _kernels() -> ModuleType:
    from relax_hpc.trainer.megatron.layers import kernels

    return kernels


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., h], contiguous -> [..., h], as Hugging Face computes it. Keeps `hidden`."""
    return _rms_norm(hidden, weight, eps)[0]


def rms_norm_beside(hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Does as `rms_norm`, and returns `hidden` again, for the residual.

    Its gradient is added in the same pass over memory as the norm's.
    """
    return _rms_norm(hidden, weight, eps)


def norm_and_rotate(
    mixed: Tensor, query_weight: Tensor, key_weight: Tensor, rotation: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the output of the qkv layer; normalises and rotates queries and keys.

    Args:
        mixed: [T, query groups, n + 2, d]: n queries, a key and a value.
        query_weight: [d], and `key_weight`: of the norms.
        rotation: [T, 2, d / 2] float32, cosines and sines.

    Returns:
        [T, query groups * n, d]; [T, query groups, d] twice. Keeps `mixed`.
    """
    return _norm_and_rotate(mixed, query_weight, key_weight, rotation, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 f], gate then up -> [..., f]. Keeps `gate_up`."""
    return _swiglu(gate_up)


@contextmanager
def recompute(output: Tensor, again: Callable[[], Tensor]) -> Iterator[None]:
    """Keeps no `output` for the backward pass within the block, but calls `again` then."""
    again_marker, place = object(), (output.data_ptr(), output.shape)

    def keep(tensor: Tensor) -> object:  # lives as long as what it keeps: must not hold `output`
        return again_marker if (tensor.data_ptr(), tensor.shape) == place else tensor

    def give(kept: object) -> Tensor:
        if kept is not again_marker:
            assert isinstance(kept, Tensor)
            return kept
        with torch.no_grad():
            return again()

    if not torch.is_grad_enabled():
        yield
        return
    with saved_tensors_hooks(keep, give):
        yield


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        if hidden.is_cuda:
            return _kernels().rms_norm_forward(hidden, weight, eps), hidden
        return weight * _normalise(hidden, eps)[0].to(hidden.dtype), hidden

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: Tensor | None,
        beside: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        if grad is None:
            return beside, None, None
        if hidden.is_cuda:
            grad, beside = grad.contiguous(), beside if beside is None else beside.contiguous()
            return *_kernels().rms_norm_backward(hidden, weight, grad, beside, ctx.eps), None
        return *_norm_backward(hidden, weight, grad, beside, ctx.eps), None


def _norm_backward(
    hidden: Tensor, weight: Tensor, grad: Tensor, beside: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    normalised, inverse = _normalise(hidden, eps)
    grad = grad.float()
    by_token = tuple(range(hidden.ndim - 1))
    weight_grad = (grad * normalised).sum(by_token).to(weight.dtype)
    gradient = _norm_gradient(grad * weight, normalised, inverse)
    return (gradient if beside is None else gradient + beside).to(hidden.dtype), weight_grad


def _normalise(hidden: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = hidden.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * inverse, inverse


def _norm_gradient(grad: Tensor, normalised: Tensor, inverse: Tensor) -> Tensor:
    return inverse * (grad - normalised * (grad * normalised).mean(-1, keepdim=True))


class _NormAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        mixed: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        rotation: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(mixed, query_weight, key_weight, rotation)
        ctx.eps = eps
        forward = _kernels().norm_and_rotate_forward if _has_kernel(mixed) else _rotate_forward
        return forward(mixed, query_weight, key_weight, rotation, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        mixed, query_weight, key_weight, rotation = ctx.saved_tensors
        query, key, value = grads
        backward = _kernels().norm_and_rotate_backward if _has_kernel(mixed) else _rotate_backward
        by_input = backward(mixed, query_weight, key_weight, rotation, query, key, value, ctx.eps)
        return *by_input, None, None


def _has_kernel(mixed: Tensor) -> bool:
    half = mixed.shape[-1] // 2
    return mixed.is_cuda and half & (half - 1) == 0


def _rotate_forward(
    mixed: Tensor, query_weight: Tensor, key_weight: Tensor, rotation: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = rotation[:, None, None, 0], rotation[:, None, None, 1]

    def turn(part: Tensor, weight: Tensor) -> Tensor:
        normalised = weight * _normalise(part, eps)[0].to(part.dtype)
        first, second = normalised.float().chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return turned.to(part.dtype).flatten(1, 2)

    return (
        turn(mixed[:, :, :-2], query_weight),
        turn(mixed[:, :, -2:-1], key_weight),
        mixed[:, :, -1].contiguous(),
    )


def _rotate_backward(
    mixed: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    rotation: Tensor,
    query_grad: Tensor,
    key_grad: Tensor,
    value_grad: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = rotation[:, None, None, 0], rotation[:, None, None, 1]
    num_groups = mixed.shape[1]

    def turn_back(part: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        first, second = grad.view(len(grad), num_groups, -1, grad.shape[2]).float().chunk(2, dim=-1)
        back = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
        normalised, inverse = _normalise(part, eps)
        weight_grad = (back * normalised).sum((0, 1, 2)).to(weight.dtype)
        return _norm_gradient(back * weight, normalised, inverse).to(part.dtype), weight_grad

    queries, for_query_weight = turn_back(mixed[:, :, :-2], query_weight, query_grad)
    keys, for_key_weight = turn_back(mixed[:, :, -2:-1], key_weight, key_grad)
    return (
        torch.cat([queries, keys, value_grad[:, :, None]], dim=2),
        for_query_weight,
        for_key_weight,
    )


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(gate_up)
        return _swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        (gate_up,) = ctx.saved_tensors
        if gate_up.is_cuda:
            out: Tensor = _kernels().swiglu_backward(gate_up, grad.contiguous())
            return out
        return _swiglu_backward(gate_up, grad)


@compile_on_gpu
def _swiglu_forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def _swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    wide = grad.float()
    sigmoid = torch.sigmoid(gate)
    gate_grad = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([gate_grad, wide * gate * sigmoid], dim=-1).to(gate_up.dtype)


_rms_norm: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] = _RMSNorm.apply
_norm_and_rotate: Callable[..., tuple[Tensor, Tensor, Tensor]] = _NormAndRotate.apply
_swiglu: Callable[[Tensor], Tensor] = _Swiglu.apply
