"""The tower of Qwen3-Omni that hears: mel spectra -> features of tokens, in plain torch.

N = tokens of all windows. Parameters have Hugging Face's names and shapes. Every sound is computed
as if it were alone.

Source: `Qwen3OmniMoeAudioEncoder` of transformers, of one sound at a time.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from relax_hpc.models.architecture import Audio
from relax_hpc.models.audio.windows import CHUNK_TOKENS, Window, tokens_of
from relax_hpc.models.vision.attention import Attend, Lengths, attend

_LONGEST_PERIOD = 10000.0


class Tower(nn.Module):
    """The whole of it."""

    places: Tensor

    def __init__(self, shape: Audio, attend: Attend = attend) -> None:
        super().__init__()
        hidden, channels = shape.hidden_size, shape.channels
        self.conv2d1 = _halving(1, channels)
        self.conv2d2 = _halving(channels, channels)
        self.conv2d3 = _halving(channels, channels)
        self.conv_out = nn.Linear(channels * tokens_of(shape.bins), hidden, bias=False)
        self.layers = nn.ModuleList(_Layer(shape, attend) for _ in range(shape.num_layers))
        self.ln_post = nn.LayerNorm(hidden)
        self.proj1 = nn.Linear(hidden, hidden)
        self.proj2 = nn.Linear(hidden, shape.out_size)
        self.register_buffer("places", _places(CHUNK_TOKENS, hidden), persistent=False)

    def forward(self, mel: Tensor, windows: Sequence[Window], *, recompute: bool = False) -> Tensor:
        """Hears.

        Args:
            mel: [bins, frames] of windows, one after the other, in the dtype of the weights.
            windows: at least one.
            recompute: make what is inside a layer again for the gradient, instead of keeping it.

        Returns:
            [N, out_size]
        """
        again = recompute and torch.is_grad_enabled()
        if again:
            hidden = checkpoint(self._embedded, mel, windows, use_reentrant=False)
        else:
            hidden = self._embedded(mel, windows)
        lengths = Lengths.of([window.tokens for window in windows], hidden.device)
        for layer in self.layers:
            if again:
                hidden = checkpoint(layer, hidden, lengths, use_reentrant=False)
            else:
                hidden = layer(hidden, lengths)
        feature: Tensor = self.proj2(functional.gelu(self.proj1(self.ln_post(hidden))))
        return feature

    def _embedded(self, mel: Tensor, windows: Sequence[Window]) -> Tensor:
        """[bins, frames] of windows -> [N, hidden]; chunks of one room are computed in one call."""
        chunks, begin = list[Tensor](), 0
        for window in windows:
            part = mel.narrow(1, begin, window.frames)
            filled = functional.pad(part, (0, -window.frames % window.room)).contiguous()
            chunks.append(filled.view(len(filled), -1, window.room).transpose(0, 1))
            begin += window.frames
        found: list[Tensor] = [mel] * len(windows)
        for room in sorted({window.room for window in windows}):
            own = [number for number, window in enumerate(windows) if window.room == room]
            made = self._convolved(torch.cat([chunks[number] for number in own]))
            counts = [len(chunks[number]) for number in own]
            for number, each in zip(own, torch.split(made, counts), strict=True):
                found[number] = each.flatten(0, 1)[: windows[number].tokens]
        return torch.cat(found)

    def _convolved(self, chunks: Tensor) -> Tensor:
        """[n, bins, room] -> [n, tokens, hidden]."""
        hidden = chunks[:, None]
        for convolution in (self.conv2d1, self.conv2d2, self.conv2d3):
            hidden = functional.gelu(convolution(hidden))
        embedded: Tensor = self.conv_out(hidden.permute(0, 3, 1, 2).flatten(2))
        return embedded + self.places[: embedded.shape[1]].to(embedded.dtype)


class _Layer(nn.Module):
    def __init__(self, shape: Audio, attend: Attend) -> None:
        super().__init__()
        self.self_attn = _Attention(shape, attend)
        self.self_attn_layer_norm = nn.LayerNorm(shape.hidden_size)
        self.fc1 = nn.Linear(shape.hidden_size, shape.ffn_hidden_size)
        self.fc2 = nn.Linear(shape.ffn_hidden_size, shape.hidden_size)
        self.final_layer_norm = nn.LayerNorm(shape.hidden_size)

    def forward(self, hidden: Tensor, lengths: Lengths) -> Tensor:
        hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden), lengths)
        inner = functional.gelu(self.fc1(self.final_layer_norm(hidden)))
        mixed: Tensor = hidden + self.fc2(inner)
        if mixed.dtype == torch.float16:
            most = torch.finfo(mixed.dtype).max - 1000
            mixed = mixed.clamp(-most, most)
        return mixed


class _Attention(nn.Module):
    def __init__(self, shape: Audio, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend, hidden = shape.num_heads, attend, shape.hidden_size
        self.q_proj, self.k_proj = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.v_proj, self.out_proj = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, hidden: Tensor, lengths: Lengths) -> Tensor:
        query, key, value = (
            projection(hidden).unflatten(-1, (self.heads, -1))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        projected: Tensor = self.out_proj(self.attend(query, key, value, lengths).flatten(1))
        return projected


def _halving(channels: int, out_channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, 3, stride=2, padding=1)


def _places(count: int, channels: int) -> Tensor:
    """[count, channels] float32, sines and then cosines of the place of a token in its chunk."""
    half = channels // 2
    falling = torch.arange(half, dtype=torch.float32) * -(math.log(_LONGEST_PERIOD) / (half - 1))
    angles = torch.arange(count)[:, None] * falling.exp()
    return torch.cat([angles.sin(), angles.cos()], dim=1)
