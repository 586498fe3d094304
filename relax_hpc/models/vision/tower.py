"""The tower of Qwen3-VL that sees: patches -> features of tokens, in plain torch.

P = patches of all frames, N = tokens of them (P / merge^2). Parameters have Hugging Face's names
and shapes. Every frame is computed as if it were alone.

Source: `Qwen3VLVisionModel` of transformers.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from relax_hpc.models.architecture import Vision
from relax_hpc.models.rotary.rotation import rotated
from relax_hpc.models.vision.attention import Attend, attend
from relax_hpc.models.vision.frames import Places

_EPSILON = 1e-6


class Tower(nn.Module):
    """The whole of it."""

    def __init__(self, shape: Vision, attend: Attend = attend) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = _PatchEmbed(shape)
        self.pos_embed = nn.Embedding(shape.positions**2, shape.hidden_size)
        self.blocks = nn.ModuleList(_Block(shape, attend) for _ in range(shape.num_layers))
        self.merger = _Merger(shape, shape.hidden_size)
        merged = shape.hidden_size * shape.merge**2
        self.deepstack_merger_list = nn.ModuleList(_Merger(shape, merged) for _ in shape.taps)

    def forward(self, patches: Tensor, places: Places, *, recompute: bool = False) -> list[Tensor]:
        """Sees.

        Args:
            patches: [P, values of a patch], in the dtype of the weights.
            places: of the patches.
            recompute: make what is inside a layer again for the gradient, instead of keeping it.

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
    def __init__(self, shape: Vision) -> None:
        super().__init__()
        size = (shape.time, shape.patch, shape.patch)
        self.proj = nn.Conv3d(3, shape.hidden_size, size, size)

    def forward(self, patches: Tensor) -> Tensor:
        # A patch is all that the kernel sees: the product is the convolution, and 30 times faster.
        return functional.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class _Block(nn.Module):
    def __init__(self, shape: Vision, attend: Attend) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.hidden_size, _EPSILON)
        self.norm2 = nn.LayerNorm(shape.hidden_size, _EPSILON)
        self.attn = _Attention(shape, attend)
        self.mlp = _FeedForward(shape)

    def forward(self, hidden: Tensor, places: Places) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), places)
        mixed: Tensor = hidden + self.mlp(self.norm2(hidden))
        return mixed


class _Attention(nn.Module):
    def __init__(self, shape: Vision, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = shape.num_heads, attend
        self.qkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, hidden: Tensor, places: Places) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).unbind(1)
        query, key = rotated(query, places.rotation), rotated(key, places.rotation)
        projected: Tensor = self.proj(self.attend(query, key, value, places.frames).flatten(1))
        return projected


class _FeedForward(nn.Module):
    def __init__(self, shape: Vision) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.hidden_size, shape.ffn_hidden_size)
        self.linear_fc2 = nn.Linear(shape.ffn_hidden_size, shape.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = functional.gelu(self.linear_fc1(hidden), approximate="tanh")
        projected: Tensor = self.linear_fc2(inner)
        return projected


class _Merger(nn.Module):
    """Patches of a token -> a feature; the norm is of a patch, or of all patches of the token."""

    def __init__(self, shape: Vision, normed: int) -> None:
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
