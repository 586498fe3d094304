"""Norm, rotation and SwiGLU with gradients by hand, and what is kept for them."""

import weakref

import torch
from torch.nn import functional

from relax_hpc.trainer.megatron.layers import dense
from relax_hpc.trainer.megatron.layers.gradient_fusion import add_product


def test_gradients_by_hand_are_those_of_finite_differences():
    torch.manual_seed(0)

    def normal(*size):
        return torch.randn(*size, dtype=torch.float64, requires_grad=True)

    angles = torch.rand(3, 4, dtype=torch.float64)
    rotation = torch.stack([angles.cos(), angles.sin()], dim=1)
    # They compute in float32 inside.
    close = {"eps": 1e-3, "atol": 1e-2, "rtol": 1e-2, "nondet_tol": 0.0}
    check = torch.autograd.gradcheck
    assert check(lambda x, w: dense.rms_norm(x, w, 1e-6), (normal(3, 1, 8), normal(8)), **close)
    assert check(
        lambda x, w: dense.rms_norm_beside(x, w, 1e-6), (normal(3, 1, 8), normal(8)), **close
    )
    assert check(dense.swiglu, (normal(3, 1, 8),), **close)
    assert check(
        lambda m, q, k: dense.norm_and_rotate(m, q, k, rotation, 1e-6),
        (normal(3, 2, 4, 8), normal(8), normal(8)),
        **close,
    )


def test_what_is_made_again_is_not_kept_and_the_gradient_is_the_same():
    torch.manual_seed(0)
    hidden, weight, matrix = torch.randn(5, 8), torch.rand(8), torch.randn(4, 8)
    gradients, alive = [], []
    for again in (False, True):
        inputs = [x.clone().requires_grad_() for x in (hidden, weight, matrix)]
        out = dense.rms_norm(inputs[0], inputs[1], 1e-6)
        made = [x.detach() for x in inputs]
        storage = weakref.ref(out.untyped_storage())
        if again:
            with dense.recompute(out, lambda made=made: dense.rms_norm(made[0], made[1], 1e-6)):
                result = out @ inputs[2].t()
        else:
            result = out @ inputs[2].t()
        del out
        alive.append(storage() is not None)
        result.square().sum().backward()
        gradients.append([x.grad for x in inputs])
    assert alive == [True, False]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_what_goes_past_a_norm_alone_has_its_own_gradient_only():
    hidden = torch.ones(2, 4, requires_grad=True)
    _, beside = dense.rms_norm_beside(hidden, torch.ones(4, requires_grad=True), 1e-6)
    (3 * beside).sum().backward()
    assert hidden.grad.tolist() == [[3.0] * 4] * 2


def test_swiglu_takes_the_gate_first():
    x = torch.tensor([[1.0, -2.0, 3.0, 5.0]])
    expected = functional.silu(torch.tensor([[1.0, -2.0]])) * torch.tensor([[3.0, 5.0]])
    torch.testing.assert_close(dense.swiglu(x), expected)


def test_a_product_is_added_in_float32():
    total = torch.full((2, 2), 1.0)
    left = torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16)
    add_product(total, left, torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16))
    assert total.tolist() == [[4.0, 5.0], [7.0, 9.0]]
