"""Computes dense text models in plain torch, with a preallocated KV cache, for sampling.

It reads Hugging Face checkpoints by itself and keeps the query, key and value projections (and the
two halves of the MLP's input) in one matrix each, so a decode step is few operations. The weights
keep their Hugging Face names: `weights` maps each name to a view to copy into.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from relax_hpc.config.hf_config import ends_of
from relax_hpc.errors import ConfigError, EngineError
from relax_hpc.inference.embedded import launch
from relax_hpc.trainer.models.hf_files import HfFiles
from relax_hpc.trainer.models.registry import FAMILIES, read_architecture
from relax_hpc.trainer.models.rope import Rope


class ModelShape(NamedTuple):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_eps: float
    rope: Rope
    tied: bool
    has_qk_norms: bool
    has_qkv_biases: bool
    eos_ids: frozenset[int]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads a checkpoint's config.json and generation_config.json.

        Raises:
            ConfigError: missing, or an unsupported architecture.
        """
        found = read_architecture(folder)
        if not launch.computes(found):
            raise ConfigError(
                f"model.path = {folder}: the embedded engine serves dense models of text, "
                f"not {found.model_type}; use engines.rollout.kind = 'sglang'"
            )
        has = FAMILIES[found.model_type].transformer(found)
        return cls(
            vocab_size=found.vocab_size,
            hidden_size=found.hidden_size,
            intermediate_size=found.ffn_hidden_size,
            num_layers=found.num_layers,
            num_heads=found.num_heads,
            num_kv_heads=found.num_kv_heads,
            head_dim=found.head_dim,
            max_positions=found.max_positions,
            rms_eps=found.norm_epsilon,
            rope=found.rope,
            tied=found.tied_embeddings,
            has_qk_norms=has["qk_layernorm"],
            has_qkv_biases=has["add_qkv_bias"],
            eos_ids=ends_of(folder),
        )


class KvCache:
    """Keys and values of all running requests; slots 0..B-1 are in use, without holes."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self.data = self._allocate(0, 0)
        """[layers, 2 (key, value), slots, kv heads, positions, head dim]"""

    def reserve(self, slots: int, positions: int) -> None:
        """Grows to at least `slots` x `positions`, by doubling; contents stay."""
        have_slots, have_positions = self.data.shape[2], self.data.shape[4]
        if slots <= have_slots and positions <= have_positions:
            return
        old = self.data
        self.data = self._allocate(
            max(slots, have_slots if slots <= have_slots else 2 * have_slots),
            max(positions, have_positions if positions <= have_positions else 2 * have_positions),
        )
        self.data[:, :, :have_slots, :, :have_positions] = old

    def move(self, source: int, target: int) -> None:
        """Moves a request's slot into the hole that a finished one left."""
        self.data[:, :, target] = self.data[:, :, source]

    def _allocate(self, slots: int, positions: int) -> Tensor:
        s = self._shape
        size = (s.num_layers, 2, slots, s.num_kv_heads, positions, s.head_dim)
        # Zeros, not empty: masked positions are multiplied by 0, and 0 * nan would be nan.
        return torch.zeros(size, dtype=self._dtype, device=self._device)


class _Layer(NamedTuple):
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder:
    """The weights and two forward passes: prefill of prompts, decode of one token each."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.weights: dict[str, Tensor] = {}
        """Hugging Face name -> view of the storage the forward pass reads."""
        self._embedding = self._make("model.embed_tokens.weight", shape.vocab_size)
        self._layers = [self._make_layer(i) for i in range(shape.num_layers)]
        self._norm = self._make_vector("model.norm.weight", shape.hidden_size)
        self._head = (
            self._embedding if shape.tied else self._make("lm_head.weight", shape.vocab_size)
        )
        self._inverse_frequency = shape.rope.inverse_frequencies(shape.head_dim, device)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copies named tensors into place. Returns the names taken.

        Nothing is changed unless all names and shapes fit. `lm_head.weight` of a model with tied
        embeddings is accepted and ignored, as other engines do.

        Raises:
            EngineError: unknown name or wrong shape.
        """
        tensors = [(n, t) for n, t in tensors if not (self.shape.tied and n == "lm_head.weight")]
        for name, tensor in tensors:
            if name not in self.weights:
                raise EngineError(f"{name}: this model has no such weight")
            if tensor.shape != self.weights[name].shape:
                raise EngineError(
                    f"{name}: shape {tuple(tensor.shape)}, "
                    f"where this model has {tuple(self.weights[name].shape)}"
                )
        for name, tensor in tensors:
            self.weights[name].copy_(tensor)
        return {name for name, _ in tensors}

    def load_folder(self, folder: Path) -> None:
        """Loads a whole Hugging Face checkpoint.

        Raises:
            EngineError: no safetensors there, or not exactly those of this model.
        """
        try:
            with HfFiles(folder) as files:
                if self.shape.tied:
                    files.check_tied()
                loaded = self.load((name, files.read(name)) for name in files.names)
        except ConfigError as error:
            raise EngineError(str(error)) from None
        if missing := sorted(self.weights.keys() - loaded):
            raise EngineError(f"{folder}: {len(missing)} weights are missing, e.g. {missing[0]}")

    def prefill(self, tokens: Tensor, cache: KvCache, slots: Tensor, source: Tensor) -> Tensor:
        """Runs prompts of equal length and fills the cache of all requests that share them.

        Args:
            tokens: [n, T] distinct prompts.
            slots: [m] cache slots to fill, m >= n.
            source: [m] index of the prompt for each slot.

        Returns:
            [n, vocab] logits after each prompt.
        """
        length = tokens.shape[1]
        positions = torch.arange(length, device=self.device)[None]

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.data[index, 0, slots, :, :length] = k[source]
            cache.data[index, 1, slots, :, :length] = v[source]
            gqa = q.shape[1] != k.shape[1]
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)

        return self._forward(tokens, positions, attend)

    def decode(self, tokens: Tensor, positions: Tensor, cache: KvCache, length: int) -> Tensor:
        """Decodes one token for each of the first B slots.

        Args:
            tokens: [B] the last token of each request.
            positions: [B] of these tokens in their sequences.
            length: the largest position + 1.

        Returns:
            [B, vocab] logits.
        """
        rows, shape = torch.arange(len(tokens), device=self.device), self.shape
        group = shape.num_heads // shape.num_kv_heads
        reach = torch.arange(length, device=self.device)[None] <= positions[:, None]
        mask = torch.zeros(reach.shape, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill_(~reach, float("-inf"))[:, None, None]

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.data[index]
            keys[rows, :, positions] = k[:, :, 0]
            values[rows, :, positions] = v[:, :, 0]
            # The query heads that share a key head become rows of one small matrix product.
            q = q.view(len(tokens), shape.num_kv_heads, group, shape.head_dim)
            out = functional.scaled_dot_product_attention(
                q, keys[: len(tokens), :, :length], values[: len(tokens), :, :length], mask
            )
            return out.reshape(len(tokens), shape.num_heads, 1, shape.head_dim)

        return self._forward(tokens[:, None], positions[:, None], attend)

    def _forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:  # noqa: ANN401
        """`attend(layer, q, k, v)` of [n, heads, T, head dim]. Returns [n, vocab], last token."""
        shape = self.shape
        angle = positions[..., None] * self._inverse_frequency  # [n or 1, T, head dim / 2]
        angle = torch.cat([angle, angle], -1)[:, :, None]
        cos, sin = (
            (part * shape.rope.attention_factor).to(self.dtype)
            for part in (angle.cos(), angle.sin())
        )
        x = functional.embedding(tokens, self._embedding)
        n, length = tokens.shape
        heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        for index, layer in enumerate(self._layers):
            qkv = functional.linear(self._rms(x, layer.input_norm), layer.qkv, layer.qkv_bias)
            q, k, v = qkv.view(n, length, sum(heads), shape.head_dim).split_with_sizes(heads, 2)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = self._rms(q, layer.q_norm), self._rms(k, layer.k_norm)
            q, k = (_rotate(part, cos, sin).transpose(1, 2) for part in (q, k))
            out = attend(index, q, k, v.transpose(1, 2))
            x = x + functional.linear(out.transpose(1, 2).reshape(n, length, -1), layer.out)
            gate, up = functional.linear(self._rms(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        return functional.linear(self._rms(x[:, -1], self._norm), self._head)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.shape.rms_eps)

    def _make(self, name: str, rows: int, columns: int | None = None) -> Tensor:
        size = (rows, columns or self.shape.hidden_size)
        return self._register(name, torch.empty(size, dtype=self.dtype, device=self.device))

    def _make_vector(self, name: str, size: int) -> Tensor:
        return self._register(name, torch.empty(size, dtype=self.dtype, device=self.device))

    def _register(self, name: str, tensor: Tensor) -> Tensor:
        self.weights[name] = tensor
        return tensor

    def _make_layer(self, index: int) -> _Layer:
        s, prefix = self.shape, f"model.layers.{index}."
        q_rows, kv_rows = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim

        def fuse(parts: dict[str, int], kind: str = "weight") -> Tensor:
            rows = sum(parts.values())
            size = (rows, s.hidden_size) if kind == "weight" else (rows,)
            whole = torch.empty(size, dtype=self.dtype, device=self.device)
            for name, view in zip(parts, whole.split_with_sizes(list(parts.values())), strict=True):
                self._register(f"{prefix}{name}.{kind}", view)
            return whole

        def head_norm(name: str) -> Tensor | None:
            if not s.has_qk_norms:
                return None
            return self._make_vector(f"{prefix}self_attn.{name}.weight", s.head_dim)

        projections = {
            "self_attn.q_proj": q_rows,
            "self_attn.k_proj": kv_rows,
            "self_attn.v_proj": kv_rows,
        }

        return _Layer(
            input_norm=self._make_vector(f"{prefix}input_layernorm.weight", s.hidden_size),
            qkv=fuse(projections),
            qkv_bias=fuse(projections, "bias") if s.has_qkv_biases else None,
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            out=self._make(f"{prefix}self_attn.o_proj.weight", s.hidden_size, q_rows),
            mlp_norm=self._make_vector(f"{prefix}post_attention_layernorm.weight", s.hidden_size),
            gate_up=fuse(
                {"mlp.gate_proj": s.intermediate_size, "mlp.up_proj": s.intermediate_size}
            ),
            down=self._make(f"{prefix}mlp.down_proj.weight", s.hidden_size, s.intermediate_size),
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding to [n, T, heads, head dim]."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
