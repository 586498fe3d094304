"""The layers Megatron-core lacks without Transformer Engine: norm, rotary positions, fused blocks.

T = tokens of a packed micro-batch on this rank. Hidden states are [T, 1, h]: to Megatron-core a
micro-batch is one long sequence. Norm and SwiGLU outputs are not kept for the backward pass but
computed again: a pass over memory instead of a third of all activations.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn import functional

from relax_hpc.engines.megatron.attention.packed_attention import PackedRows
from relax_hpc.engines.megatron.layers import fused
from relax_hpc.models.rotary.rope import Rope
from relax_hpc.models.rotary.rotation import rotated


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
            out, self._beside = fused.rms_norm_beside(hidden, self.weight, self.eps)
        else:
            out = fused.rms_norm(hidden, self.weight, self.eps)
        # The layer that is handed this very tensor need not keep it.
        out.again = partial(fused.rms_norm, hidden.detach(), self.weight.detach(), self.eps)  # type: ignore[attr-defined]
        return out

    def past(self, hidden: Tensor) -> Tensor:
        """Returns the last call's input, to be added as residual; see `fused.rms_norm_beside`."""
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

        Of [1, T, 3] positions in space each channel pair turns by its own.
        """
        if position_ids.ndim == 3:
            angles = position_ids[0, :, self.axes].float() * self.inverse_frequencies
        else:
            angles = position_ids[0, :, None].float() * self.inverse_frequencies
        return torch.cat([angles, angles], dim=-1)[:, None, None]


def residual_add(
    training: bool, fused: bool, *, past: Callable[[Tensor], Tensor] | None = None
) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """Megatron's `bias_dropout_add` for models without dropout: no pass over memory for it.

    Args:
        past: that of the norm in front of the block.
    """

    def add(out_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        assert prob == 0.0
        out, bias = out_with_bias
        residual = residual if past is None else past(residual)
        return residual + (out if bias is None else out + bias)

    return add


class FusedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's, with the norms of queries and keys, where there are any, and the rotation in one
    pass."""

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
        with kept_input(hidden_states, self.recompute_norm):
            mixed, _ = self.linear_qkv(hidden_states)
        if rows.rotation is None:
            angles = rotary_pos_emb[:, 0, 0, : rotary_pos_emb.shape[-1] // 2]
            rows.rotation = torch.stack([angles.cos(), angles.sin()], dim=1)
        query, key, value = self._turned(
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

    def _turned(self, mixed: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, query groups, n + 2, d]: n queries, a key and a value -> [T, heads, d] of each."""
        if isinstance(self.q_layernorm, RMSNorm):
            return fused.norm_and_rotate(
                mixed, self.q_layernorm.weight, self.k_layernorm.weight, rotation,
                self.q_layernorm.eps,
            )  # fmt: skip
        query, key, value = torch.split(mixed, [mixed.shape[2] - 2, 1, 1], dim=2)
        return (
            rotated(query, rotation).flatten(1, 2),
            rotated(key.squeeze(2), rotation),
            value.squeeze(2),
        )


class FusedMLP(MLP):  # type: ignore[misc]
    """Megatron's, with SwiGLU in one pass; if `recompute`, the first product is made again, too."""

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
        with kept_input(hidden_states, self.recompute_norm):
            gate_up, _ = self.linear_fc1(hidden_states)
        if self.recompute and torch.is_grad_enabled():
            hidden_again = made_again(hidden_states)
            gate_up_again = _Twice(lambda: self.linear_fc1(hidden_again())[0].detach())
            with fused.recomputed(gate_up, gate_up_again):
                activated = fused.swiglu(gate_up)
        else:
            kept = gate_up.detach()
            gate_up_again = _Twice(lambda: kept)
            activated = fused.swiglu(gate_up)
        with (
            fused.recomputed(activated, lambda: fused.swiglu(gate_up_again()))
            if self.recompute or self.recompute_swiglu
            else nullcontext()
        ):
            projected: tuple[Tensor, Tensor | None] = self.linear_fc2(activated)
        return projected


class _Twice:
    """Makes a tensor when it is first asked for and lets go of it the second time."""

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
        """Does as Megatron's; to the first layers' outputs come features of media."""
        hidden, context = super().forward(*args, **kwargs)
        seen = kwargs["packed_seq_params"].seen
        if seen is not None:
            hidden = seen.beside(hidden, self.layer_number - 1)
        return hidden, context


def set_recomputed(model: nn.Module, passes: Collection[str]) -> None:
    """Sets which outputs are made again for the gradient instead of kept: "norm", "swiglu"."""
    for module in model.modules():
        if hasattr(module, "recompute_norm"):  # experts, too
            setattr(module, "recompute_norm", "norm" in passes)  # noqa: B010
        if isinstance(module, FusedMLP):
            module.recompute_swiglu = "swiglu" in passes


def kept_input(hidden: Tensor, recompute: bool) -> AbstractContextManager[None]:
    """Lets what is called inside keep no `hidden` for the gradient, if it can be made again."""
    return fused.recomputed(hidden, made_again(hidden)) if recompute else nullcontext()


def made_again(hidden: Tensor) -> Callable[[], Tensor]:
    """Returns a function that makes it again, if a norm made it; else it is kept."""
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
