"""Queries and keys turned by their positions: by hand, and their gradient against autograd's."""

import math

import pytest
import torch

from relax_hpc.trainer.models.towers import rotate


def plain(heads, rotation):
    """Pairs of channels as complex numbers, in float64."""
    first, second = heads.double().chunk(2, dim=-1)
    angles = torch.complex(*rotation.double().unbind(1))
    angles = angles.view(len(angles), *[1] * (heads.ndim - 2), -1)
    turned = torch.complex(first, second) * angles
    return torch.cat([turned.real, turned.imag], dim=-1)


def test_a_quarter_turn_by_hand():
    heads = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    rotation = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])  # a quarter turn, and none
    assert rotate(heads, rotation).tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]


@pytest.mark.parametrize("shape", [(7, 3, 8), (7, 2, 4, 8)])
def test_the_gradient_is_that_of_complex_numbers(shape):
    torch.manual_seed(0)
    angles = torch.rand(shape[0], shape[-1] // 2) * 2 * math.pi
    rotation = torch.stack([angles.cos(), angles.sin()], dim=1)
    upstream = torch.randn(shape)
    results = []
    for how in (rotate, plain):
        wide = torch.randn(*shape[:-1], 2 * shape[-1], generator=torch.Generator().manual_seed(1))
        wide.requires_grad_()
        out = how(wide[..., : shape[-1]], rotation)  # a view, as a part of a product is
        out.backward(upstream.to(out.dtype))
        results.append((out, wide.grad))
    for mine, theirs in zip(*results, strict=True):
        assert torch.allclose(mine.double(), theirs.double(), atol=1e-6)
