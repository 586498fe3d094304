import math

import pytest
import torch

from relax_hpc.algorithms.advantages import group_relative
from relax_hpc.algorithms.losses import grpo

SETTINGS = {"clip_low": 0.2, "clip_high": 0.28, "importance_cap": 2.0}


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [
        (0.5, +1.0, -1.28),  # already up, pushed further up: held at 1 + clip_high
        (-0.5, -1.0, +0.80),  # already down, pushed further down: held at 1 - clip_low
        (0.5, -1.0, +1.6487),  # already up, pushed back down: free, e**0.5
    ],
)
def test_clips_only_steps_that_go_further_out(log_ratio, advantage, expected):
    one = torch.ones(1)
    zero = 0 * one
    loss, _ = grpo(log_ratio * one, zero, zero, advantage * one, one.bool(), **SETTINGS)
    assert loss.item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("gap", "weight"), [(0.0, 1.0), (0.5, math.exp(0.5)), (3.0, 2.0)])
def test_importance_weight_is_the_ratio_to_the_sampler_up_to_the_cap(gap, weight):
    old = torch.tensor([-1.0])
    loss, metrics = grpo(old, old, old - gap, torch.ones(1), torch.ones(1).bool(), **SETTINGS)
    assert loss.item() == pytest.approx(-weight, rel=1e-6)
    assert metrics["loss/importance_capped"].item() == float(gap == 3.0)


def test_garbage_under_the_mask_changes_neither_loss_nor_gradient():
    logprobs = torch.tensor([-1.0, float("-inf")], requires_grad=True)
    old, mask = torch.tensor([-1.0, float("nan")]), torch.tensor([True, False])
    rollout = torch.tensor([-1.0, float("inf")])
    advantages = torch.tensor([1.0, float("nan")])
    loss, metrics = grpo(logprobs, old, rollout, advantages, mask, **SETTINGS)
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.0, 0.0]))
    assert all(math.isfinite(v) for v in metrics.values())


def test_micro_batches_add_up_to_one_batch():
    rng = torch.Generator().manual_seed(0)
    logprobs, old, rollout, advantages = torch.randn(4, 8, generator=rng)
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1], dtype=torch.bool)
    whole, _ = grpo(logprobs, old, rollout, advantages, mask, **SETTINGS)
    parts = [
        grpo(logprobs[s], old[s], rollout[s], advantages[s], mask[s], **SETTINGS).loss
        for s in (slice(0, 3), slice(3, 8))
    ]
    torch.testing.assert_close(whole, sum(parts))


def test_advantages_of_a_hand_worked_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    centred = group_relative(rewards, normalize_std=False)
    torch.testing.assert_close(centred[0], torch.tensor([0.5, -0.5, -0.5, 0.5]))
    scaled = group_relative(rewards, normalize_std=True)
    torch.testing.assert_close(scaled[0], torch.tensor([1.0, -1.0, -1.0, 1.0]), rtol=1e-4, atol=0)
    assert scaled[1].abs().max() == 0  # nothing to learn from a group of equals
