"""Computes the encoders of Qwen3-VL and Qwen3-Omni in plain torch: patches or mel spectra ->
features.

P = patches of all frames, N = tokens of them (P / merge^2), or of all windows of sound. Parameters
have Hugging Face's names and shapes. A frame is a time step of a medium; frames and sounds are each
computed as if they were alone. The patches of a token lie side by side, as `data.media.patches`
cuts them.

Source: `Qwen3VLVisionModel` and `Qwen3OmniMoeAudioEncoder` of transformers, of one sound at a time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from relax_hpc.runtime.devices import compile_on_gpu, send
from relax_hpc.trainer.models.architecture import (
    CHUNK_TOKENS,
    AudioArchitecture,
    SoundWindow,
    VisionArchitecture,
    tokens_of,
)


@dataclass(frozen=True)
class SequenceOffsets:
    """Boundaries of the segments."""

    rows: tuple[int, ...]
    cu_seqlens: Tensor
    """[segments + 1] int32, on the device of the encoder."""
    made: dict[str, object] = field(default_factory=dict)
    """Values that a kernel computes once for all layers."""

    @classmethod
    def of(cls, rows: Sequence[int], device: torch.device) -> "SequenceOffsets":
        ends = torch.tensor([0, *accumulate(rows)], dtype=torch.int32, device="cpu")
        return cls(tuple(rows), send(ends, device))


TowerAttentionKernel = Callable[[Tensor, Tensor, Tensor, SequenceOffsets], Tensor]
"""A kernel: query, key and value, [P, heads, d] each -> [P, heads, d]."""


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: SequenceOffsets) -> Tensor:
    """Works everywhere.

    Consecutive segments of one length are computed in one call; on a GPU, in 16 bits, all are.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _in_one(query, key, value, lengths)
    outs, begin = [], 0
    for length, same in groupby(lengths.rows):
        end = begin + length * len(list(same))
        q, k, v = (
            x[begin:end].view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)
        )
        out = functional.scaled_dot_product_attention(q, k, v)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        begin = end
    return torch.cat(outs)


def _in_one(query: Tensor, key: Tensor, value: Tensor, lengths: SequenceOffsets) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens, longest = lengths.cu_seqlens, max(lengths.rows)
    out = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest)
    assert isinstance(out, Tensor)
    return out


def rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Turns channel i and channel i + d / 2 of every head by the i-th angle, in float32.

    Args:
        heads: [T, ..., d], queries or keys.
        rotation: [T, 2, d / 2] float32, cosines and sines of the angles of each position.

    Returns:
        As `heads`, contiguous.
    """
    return cast(Tensor, _Rotated.apply(heads, rotation))  # type: ignore[no-untyped-call]


class _Rotated(torch.autograd.Function):
    """Turns, and turns the gradient back: keeps only the angles."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, rotation: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(rotation)
        cosine, sine = rotation.unbind(1)
        return _turn(heads, cosine, sine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        cosine, sine = ctx.saved_tensors[0].unbind(1)
        return _turn(grad, cosine, -sine), None


@compile_on_gpu
def _turn(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    cosine, sine = (
        part.view(len(part), *[1] * (heads.ndim - 2), part.shape[1]) for part in (cosine, sine)
    )
    first, second = heads.float().chunk(2, dim=-1)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat(turned, dim=-1).to(heads.dtype)


class Frame(NamedTuple):
    height: int
    width: int

    @property
    def patches(self) -> int:
        return self.height * self.width


@dataclass(frozen=True)
class Places:
    """The places of packed patches, on the device of the encoder."""

    frames: SequenceOffsets
    nearest: Tensor
    """[P, 4] int64, learned positions around a patch."""
    weights: Tensor
    """[P, 4] float32, their weights in its position."""
    rotation: Tensor
    """[P, 2, head_dim / 2] float32, cosine and sine of the angles of a patch, first those of y."""

    @classmethod
    def of(
        cls, frames: Sequence[Frame], shape: VisionArchitecture, device: torch.device
    ) -> "Places":
        """Computes the places of the patches of at least one frame."""
        # On the device: a dozen small steps, each of which would wait for all threads of a CPU.
        with torch.device(device):
            grids = {frame: _grid(frame, shape.merge) for frame in set(frames)}
            found = {
                frame: _interpolate(grid, frame, shape.positions) for frame, grid in grids.items()
            }
            learned = [found[frame] for frame in frames]
            each = torch.cat([grids[frame] for frame in frames])
            angles = (each[:, :, None].float() * _frequencies(shape)).flatten(1)
            return cls(
                SequenceOffsets.of([frame.patches for frame in frames], device),
                torch.cat([nearest for nearest, _ in learned]),
                torch.cat([weights for _, weights in learned]),
                torch.stack([angles.cos(), angles.sin()], dim=1),
            )


def _grid(frame: Frame, merge: int) -> Tensor:
    """Returns [patches, 2] int64 y and x of the patches, those of a token side by side."""
    y, x = torch.meshgrid(torch.arange(frame.height), torch.arange(frame.width), indexing="ij")
    rows, columns = frame.height // merge, frame.width // merge
    both = torch.stack([y, x], dim=-1).view(rows, merge, columns, merge, 2)
    return both.transpose(1, 2).reshape(-1, 2)


def _interpolate(grid: Tensor, frame: Frame, side: int) -> tuple[Tensor, Tensor]:
    """Interpolates learned positions bilinearly, with the grid's corners on those of the frame.

    Returns:
        [patches, 4] int64 numbers of learned positions, and their weights, float32.
    """
    near, shares = [], []
    for axis, size in enumerate(frame):
        at = grid[:, axis].float() * (side - 1) / max(size - 1, 1)
        below = at.floor()
        both = below.long()[:, None] + torch.arange(2)
        near.append(both.clamp(max=side - 1))
        shares.append(1 - (at[:, None] - both).abs())
    nearest = near[0][:, :, None] * side + near[1][:, None, :]
    return nearest.flatten(1), (shares[0][:, :, None] * shares[1][:, None, :]).flatten(1)


def _frequencies(shape: VisionArchitecture) -> Tensor:
    """Returns [head_dim / 4] float32, radians per patch."""
    channels = shape.hidden_size // shape.num_heads // 2
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    return 1.0 / shape.rope_base**exponents


_EPSILON = 1e-6


class VisionTower(nn.Module):
    def __init__(self, shape: VisionArchitecture, attend: TowerAttentionKernel = attend) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = _PatchEmbed(shape)
        self.pos_embed = nn.Embedding(shape.positions**2, shape.hidden_size)
        self.blocks = nn.ModuleList(_Block(shape, attend) for _ in range(shape.num_layers))
        self.merger = _Merger(shape, shape.hidden_size)
        merged = shape.hidden_size * shape.merge**2
        self.deepstack_merger_list = nn.ModuleList(_Merger(shape, merged) for _ in shape.taps)

    def forward(self, patches: Tensor, places: Places, *, recompute: bool = False) -> list[Tensor]:
        """Encodes patches.

        Args:
            patches: [P, values of a patch], in the dtype of the weights.
            recompute: whether to recompute a layer's activations for the gradient.

        Returns:
            [N, out_size] for each level: the features themselves, then those of the taps.
        """
        weights = places.weights[..., None]
        positions = (self.pos_embed(places.nearest) * weights).sum(1)
        hidden = self.patch_embed(patches)
        hidden = hidden + positions.to(hidden.dtype)
        found = []
        for number, block in enumerate(self.blocks):
            if recompute and torch.is_grad_enabled():
                hidden = checkpoint(block, hidden, places, use_reentrant=False)
            else:
                hidden = block(hidden, places)
            if number in self.shape.taps:
                merger = self.deepstack_merger_list[self.shape.taps.index(number)]
                found.append(merger(hidden))
        return [self.merger(hidden), *found]


class _PatchEmbed(nn.Module):
    def __init__(self, shape: VisionArchitecture) -> None:
        super().__init__()
        size = (shape.time, shape.patch, shape.patch)
        self.proj = nn.Conv3d(3, shape.hidden_size, size, size)

    def forward(self, patches: Tensor) -> Tensor:
        # A patch is all that the kernel sees: the product is the convolution, and 30 times faster.
        return functional.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class _Block(nn.Module):
    def __init__(self, shape: VisionArchitecture, attend: TowerAttentionKernel) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.hidden_size, _EPSILON)
        self.norm2 = nn.LayerNorm(shape.hidden_size, _EPSILON)
        self.attn = _VisionAttention(shape, attend)
        self.mlp = _FeedForward(shape)

    def forward(self, hidden: Tensor, places: Places) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), places)
        mixed: Tensor = hidden + self.mlp(self.norm2(hidden))
        return mixed


class _VisionAttention(nn.Module):
    def __init__(self, shape: VisionArchitecture, attend: TowerAttentionKernel) -> None:
        super().__init__()
        self.heads, self.attend = shape.num_heads, attend
        self.qkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, hidden: Tensor, places: Places) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).unbind(1)
        query, key = rotate(query, places.rotation), rotate(key, places.rotation)
        projected: Tensor = self.proj(self.attend(query, key, value, places.frames).flatten(1))
        return projected


class _FeedForward(nn.Module):
    def __init__(self, shape: VisionArchitecture) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.hidden_size, shape.ffn_hidden_size)
        self.linear_fc2 = nn.Linear(shape.ffn_hidden_size, shape.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = functional.gelu(self.linear_fc1(hidden), approximate="tanh")
        projected: Tensor = self.linear_fc2(inner)
        return projected


class _Merger(nn.Module):
    """Merges the patches of a token into a feature; the norm is per patch, or over all of them."""

    def __init__(self, shape: VisionArchitecture, normed: int) -> None:
        super().__init__()
        merged = shape.hidden_size * shape.merge**2
        self.norm = nn.LayerNorm(normed, _EPSILON)
        self.linear_fc1 = nn.Linear(merged, merged)
        self.linear_fc2 = nn.Linear(merged, shape.out_size)

    def forward(self, hidden: Tensor) -> Tensor:
        (normed,), merged = self.norm.normalized_shape, self.linear_fc1.in_features
        tokens = self.norm(hidden.view(-1, normed)).view(-1, merged)
        feature: Tensor = self.linear_fc2(functional.gelu(self.linear_fc1(tokens)))
        return feature


_LONGEST_PERIOD = 10000.0


class SoundTower(nn.Module):
    places: Tensor

    def __init__(self, shape: AudioArchitecture, attend: TowerAttentionKernel = attend) -> None:
        super().__init__()
        hidden, channels = shape.hidden_size, shape.channels
        self.conv2d1 = _halving(1, channels)
        self.conv2d2 = _halving(channels, channels)
        self.conv2d3 = _halving(channels, channels)
        self.conv_out = nn.Linear(channels * tokens_of(shape.bins), hidden, bias=False)
        self.layers = nn.ModuleList(_SoundLayer(shape, attend) for _ in range(shape.num_layers))
        self.ln_post = nn.LayerNorm(hidden)
        self.proj1 = nn.Linear(hidden, hidden)
        self.proj2 = nn.Linear(hidden, shape.out_size)
        self.register_buffer("places", _places(CHUNK_TOKENS, hidden), persistent=False)

    def forward(
        self, mel: Tensor, windows: Sequence[SoundWindow], *, recompute: bool = False
    ) -> Tensor:
        """Encodes sounds.

        Args:
            mel: [bins, frames] of windows, one after the other, in the dtype of the weights.
            windows: at least one.
            recompute: whether to recompute a layer's activations for the gradient.

        Returns:
            [N, out_size]
        """
        again = recompute and torch.is_grad_enabled()
        if again:
            hidden = checkpoint(self._embed, mel, windows, use_reentrant=False)
        else:
            hidden = self._embed(mel, windows)
        lengths = SequenceOffsets.of([window.tokens for window in windows], hidden.device)
        for layer in self.layers:
            if again:
                hidden = checkpoint(layer, hidden, lengths, use_reentrant=False)
            else:
                hidden = layer(hidden, lengths)
        feature: Tensor = self.proj2(functional.gelu(self.proj1(self.ln_post(hidden))))
        return feature

    def _embed(self, mel: Tensor, windows: Sequence[SoundWindow]) -> Tensor:
        """[bins, frames] of windows -> [N, hidden]; chunks of equal padded length go in one
        call."""
        chunks, begin = list[Tensor](), 0
        for window in windows:
            part = mel.narrow(1, begin, window.frames)
            filled = functional.pad(part, (0, -window.frames % window.room)).contiguous()
            chunks.append(filled.view(len(filled), -1, window.room).transpose(0, 1))
            begin += window.frames
        found: list[Tensor] = [mel] * len(windows)
        for room in sorted({window.room for window in windows}):
            own = [number for number, window in enumerate(windows) if window.room == room]
            made = self._convolve(torch.cat([chunks[number] for number in own]))
            counts = [len(chunks[number]) for number in own]
            for number, each in zip(own, torch.split(made, counts), strict=True):
                found[number] = each.flatten(0, 1)[: windows[number].tokens]
        return torch.cat(found)

    def _convolve(self, chunks: Tensor) -> Tensor:
        """[n, bins, room] -> [n, tokens, hidden]."""
        hidden = chunks[:, None]
        for convolution in (self.conv2d1, self.conv2d2, self.conv2d3):
            hidden = functional.gelu(convolution(hidden))
        embedded: Tensor = self.conv_out(hidden.permute(0, 3, 1, 2).flatten(2))
        return embedded + self.places[: embedded.shape[1]].to(embedded.dtype)


class _SoundLayer(nn.Module):
    def __init__(self, shape: AudioArchitecture, attend: TowerAttentionKernel) -> None:
        super().__init__()
        self.self_attn = _SoundAttention(shape, attend)
        self.self_attn_layer_norm = nn.LayerNorm(shape.hidden_size)
        self.fc1 = nn.Linear(shape.hidden_size, shape.ffn_hidden_size)
        self.fc2 = nn.Linear(shape.ffn_hidden_size, shape.hidden_size)
        self.final_layer_norm = nn.LayerNorm(shape.hidden_size)

    def forward(self, hidden: Tensor, lengths: SequenceOffsets) -> Tensor:
        hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden), lengths)
        inner = functional.gelu(self.fc1(self.final_layer_norm(hidden)))
        mixed: Tensor = hidden + self.fc2(inner)
        if mixed.dtype == torch.float16:
            most = torch.finfo(mixed.dtype).max - 1000
            mixed = mixed.clamp(-most, most)
        return mixed


class _SoundAttention(nn.Module):
    def __init__(self, shape: AudioArchitecture, attend: TowerAttentionKernel) -> None:
        super().__init__()
        self.heads, self.attend, hidden = shape.num_heads, attend, shape.hidden_size
        self.q_proj, self.k_proj = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.v_proj, self.out_proj = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, hidden: Tensor, lengths: SequenceOffsets) -> Tensor:
        query, key, value = (
            projection(hidden).unflatten(-1, (self.heads, -1))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        projected: Tensor = self.out_proj(self.attend(query, key, value, lengths).flatten(1))
        return projected


def _halving(channels: int, out_channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, 3, stride=2, padding=1)


def _places(count: int, channels: int) -> Tensor:
    """Returns [count, channels] float32, sines and then cosines of a token's position in its
    chunk."""
    half = channels // 2
    falling = torch.arange(half, dtype=torch.float32) * -(math.log(_LONGEST_PERIOD) / (half - 1))
    angles = torch.arange(count)[:, None] * falling.exp()
    return torch.cat([angles.sin(), angles.cos()], dim=1)
