"""Frames of patches, end to end: where each patch lies, and what is computed of that alone.

P = patches of all frames. Those of a token lie side by side, as `media.patches` cuts them. A frame
is a time step of a medium: what is seen at one time is attended to at no other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from relax_hpc.models.architecture import Vision
from relax_hpc.models.vision.attention import Lengths


class Frame(NamedTuple):
    """The size of a frame, in patches."""

    height: int
    width: int

    @property
    def patches(self) -> int:
        return self.height * self.width


@dataclass(frozen=True)
class Places:
    """The places of packed patches, on the device of the tower."""

    frames: Lengths
    """Patches of each frame."""
    nearest: Tensor
    """[P, 4] int64, learned positions around a patch."""
    weights: Tensor
    """[P, 4] float32, their shares in its position."""
    rotation: Tensor
    """[P, 2, head_dim / 2] float32, cosine and sine of the angles of a patch, first those of y."""

    @classmethod
    def of(cls, frames: Sequence[Frame], shape: Vision, device: torch.device) -> "Places":
        """Computes the places of the patches of frames, of which there is at least one."""
        # On the device: a dozen small steps, each of which would wait for all threads of a CPU.
        with torch.device(device):
            grids = {frame: _grid(frame, shape.merge) for frame in set(frames)}
            found = {frame: _learned(grid, frame, shape.positions) for frame, grid in grids.items()}
            learned = [found[frame] for frame in frames]
            each = torch.cat([grids[frame] for frame in frames])
            angles = (each[:, :, None].float() * _frequencies(shape)).flatten(1)
            return cls(
                Lengths.of([frame.patches for frame in frames], device),
                torch.cat([nearest for nearest, _ in learned]),
                torch.cat([weights for _, weights in learned]),
                torch.stack([angles.cos(), angles.sin()], dim=1),
            )


def _grid(frame: Frame, merge: int) -> Tensor:
    """[patches, 2] int64 y and x of the patches, those of a token side by side."""
    y, x = torch.meshgrid(torch.arange(frame.height), torch.arange(frame.width), indexing="ij")
    rows, columns = frame.height // merge, frame.width // merge
    both = torch.stack([y, x], dim=-1).view(rows, merge, columns, merge, 2)
    return both.transpose(1, 2).reshape(-1, 2)


def _learned(grid: Tensor, frame: Frame, side: int) -> tuple[Tensor, Tensor]:
    """Bilinear, the corners of the learned grid on those of the frame.

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


def _frequencies(shape: Vision) -> Tensor:
    """[head_dim / 4] float32, radians per patch."""
    channels = shape.hidden_size // shape.num_heads // 2
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    return 1.0 / shape.rope_base**exponents
