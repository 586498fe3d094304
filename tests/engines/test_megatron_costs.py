"""The costs of a step, by hand-worked numbers; and recomputation, which changes nothing else."""

import weakref

import pytest
import torch
from trainers import FULL, equal, opened, selective, trajectories

from relax_hpc.trainer.megatron.costs import tower_flops
from relax_hpc.trainer.megatron.layers import dense
from relax_hpc.trainer.models.architecture import VisionArchitecture


def test_a_tower_counts_patches_tokens_and_the_square_of_each_frame():
    shape = VisionArchitecture(
        num_layers=2, hidden_size=8, ffn_hidden_size=20, num_heads=2, patch=4, time=2, merge=2,
        positions=4, rope_base=1e4, out_size=10, taps=(0,),
    )  # fmt: skip
    # A layer: qkv 8 x 24, projection 8 x 8, feed-forward twice 8 x 20: 576. A patch: 96 x 8 = 768.
    # A merger, of which there are two: 32 x 32 and 32 x 10 for every 4 patches: 1344.
    per_patch = 2 * 576 + 768 + 2 * 1344 / 4
    # An image of 24 patches, 3 frames of 16; scores and values of 2 layers of 8 channels.
    squares = 24**2 + 3 * 16**2
    expected = 6 * per_patch * (24 + 48) + 3 * 4 * 2 * 8 * squares
    assert tower_flops(shape, [(1, 4, 6), (3, 4, 4)]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("grid", ["dp2", "tp2", "pp2"])
def test_the_costs_of_a_step_are_those_of_all_ranks(ranks, folder, grid):
    rows, advantages = trajectories(7)
    pool = opened(ranks, folder, grid, budget=100)
    pool.train(rows=rows, advantages=advantages, num_portions=2)
    costs = pool.costs()
    for cost in costs:
        assert set(cost) == {
            "time/forward_backward", "time/update", "train/tokens_per_s_per_gpu", "train/padding",
        }  # fmt: skip
    tokens = sum(len(row.token_ids) for row in rows)
    assert costs[0]["train/tokens_per_s_per_gpu"] == costs[1]["train/tokens_per_s_per_gpu"]
    # Phases are each rank's own, so that they add up; the rate is that of both.
    assert costs[0]["time/update"] != costs[1]["time/update"]
    (cost, _), seconds = costs, seconds_of(costs)
    assert cost["train/tokens_per_s_per_gpu"] * seconds == pytest.approx(tokens)
    if grid == "dp2":
        assert cost["train/padding"] == 0.0
    pool.train(rows=rows[:1], advantages=advantages[:1])  # begins at nothing
    costs = pool.costs()
    rate = costs[0]["train/tokens_per_s_per_gpu"]
    assert rate * seconds_of(costs) == pytest.approx(len(rows[0].token_ids))


def seconds_of(costs):
    return sum(cost["time/forward_backward"] + cost["time/update"] for cost in costs)


@pytest.mark.parametrize("grid", ["pp2", "tp2", "cp2"])
def test_recomputing_activations_gives_the_same_update(ranks, folder, grid):
    """Packed documents; bitwise, as the same operations are done again."""
    rows, advantages = trajectories(8)
    found = []
    for transformer in ({}, FULL, selective("mlp")):
        pool = opened(ranks, folder, grid, budget=60, transformer=transformer)
        metrics = pool.train(rows=rows, advantages=advantages)[0]
        found.append((metrics["grad_norm"], pool.weights()[0]))
    (norm, weights), *others = found
    for other_norm, other in others:
        assert other_norm == norm and equal(other, weights)


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
