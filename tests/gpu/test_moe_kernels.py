"""On a GPU: products of experts, the passes around them and the router against float64.

Skipped elsewhere.
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from types import SimpleNamespace

from relax_hpc.trainer.megatron.layers import experts, router
from relax_hpc.trainer.megatron.layers import kernels as kernels_moe
from relax_hpc.trainer.megatron.layers.experts import ExpertRows

DEVICE = torch.device("cuda", 0)
HIDDEN, WIDTH = 256, 96
COUNTS = {
    "even": (128,) * 8,
    "odd": (1, 37, 1000, 7, 129, 64, 63, 255),
    "empty_ends": (0, 300, 0, 0, 17, 128, 1, 0),
    "one": (0, 0, 511, 0, 0, 0, 0, 0),
    "none": (0,) * 8,
}


def relative(mine, theirs):
    mine, theirs = mine.double(), theirs.double()
    return float((mine - theirs).norm() / theirs.norm().clamp_min(1e-30))


def draw(*shape, scale=1.0, dtype=torch.bfloat16):
    return (scale * torch.randn(*shape, device=DEVICE)).to(dtype)


def expected(rows, weights, first, second, counts, grad):
    """Expert by expert in float64: output and gradients of rows, weights and matrices."""
    made = [x.double().detach().requires_grad_() for x in (rows, weights, first, second)]
    r, p, w1, w2 = made
    outs = []
    for expert, part in enumerate(r.split(list(counts))):
        gate, up = part @ w1[expert, 0].t(), part @ w1[expert, 1].t()
        outs.append(torch.nn.functional.silu(gate) * up @ w2[expert].t())
    out = torch.cat(outs) * p[:, None]
    out.backward(grad.double())
    return [out.detach(), *(x.grad for x in made)]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("mix", COUNTS)
def test_experts_are_those_of_float64_whatever_the_sizes_of_the_groups(mix, main_grad, again):
    torch.manual_seed(0)
    counts = COUNTS[mix]
    total, number = sum(counts), len(counts)
    rows = draw(total, HIDDEN).requires_grad_()
    weights = torch.rand(total, device=DEVICE).requires_grad_()
    first = draw(number, 2, WIDTH, HIDDEN, scale=HIDDEN**-0.5).requires_grad_()
    second = draw(number, HIDDEN, WIDTH, scale=WIDTH**-0.5).requires_grad_()
    grad = draw(total, HIDDEN)
    if main_grad:
        for weight in (first, second):
            weight.main_grad = torch.ones(weight.shape, device=DEVICE)
    how = (lambda: rows.detach().clone()) if again else None
    out = experts._experts(rows, weights, first, second, ExpertRows.of(counts, DEVICE), how)
    out.backward(grad)
    theirs = expected(rows, weights, first, second, counts, grad)
    mine = [out, rows.grad, weights.grad, first.grad, second.grad]
    if main_grad:
        mine[3:] = [first.main_grad - 1, second.main_grad - 1]
        assert first.grad_added_to_main_grad and second.grad_added_to_main_grad
    for name, a, b in zip(("out", "rows", "weights", "first", "second"), mine, theirs, strict=True):
        assert a.shape == b.shape
        assert relative(a, b) < 1e-2, name
        if name in ("first", "second"):
            for expert, count in enumerate(counts):
                if not count:
                    assert not a[expert].any(), f"{name} of expert {expert} without rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_copied_bitwise_and_summed_in_float32(dtype):
    torch.manual_seed(0)
    rows = draw(1003, 2048, dtype=dtype)
    goes = torch.rand(1003, 40, device=DEVICE) < 0.1
    goes[17] = False
    moves = experts.moves(goes, int(goes.sum()), int(goes.sum(1).max()))
    copies = kernels_moe.take_rows(rows, moves.row)
    assert torch.equal(copies, rows[moves.row])
    noise = draw(*copies.shape, dtype=dtype)
    sums = torch.zeros(1003, 2048, device=DEVICE, dtype=torch.float64)
    sums.index_add_(0, moves.row, noise.double())
    found = kernels_moe.sum_rows(noise, moves.places)
    assert relative(found, sums) < (3e-3 if dtype == torch.bfloat16 else 1e-6)
    assert not found[17].any()
    assert torch.equal(found, kernels_moe.sum_rows(noise, moves.places))


def test_logits_of_the_router_are_not_rounded_to_bfloat16():
    torch.manual_seed(0)
    hidden, weight = draw(700, 1, 2048).requires_grad_(), draw(128, 2048, scale=0.02)
    weight.requires_grad_()
    logits = router._logits(hidden, weight)
    assert logits.dtype == torch.float32
    assert relative(logits, hidden.double() @ weight.double().t()) < 1e-5
    grad = draw(700, 1, 128, dtype=torch.float32)
    logits.backward(grad)
    assert relative(hidden.grad, grad.double() @ weight.double()) < 3e-3
    by_hand = grad.double().flatten(0, 1).t() @ hidden.double().flatten(0, 1)
    assert relative(weight.grad, by_hand) < 3e-3


def test_experts_repeat_bitwise():
    torch.manual_seed(0)
    counts = COUNTS["odd"]
    groups = ExpertRows.of(counts, DEVICE)
    rows, weights = draw(sum(counts), HIDDEN), torch.rand(sum(counts), device=DEVICE)
    made = SimpleNamespace(first=draw(8, 2, WIDTH, HIDDEN), second=draw(8, HIDDEN, WIDTH))
    outs = [
        experts._experts(rows, weights, made.first, made.second, groups, None) for _ in range(2)
    ]
    assert torch.equal(*outs)
