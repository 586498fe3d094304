import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.composition import objective_of
from relax_hpc.algorithms.corrections.tis import Tis
from relax_hpc.algorithms.kl import Kl
from relax_hpc.algorithms.part import Rows

LOSS = {"name": "ppo_clip", "anchor": "old", "clip_low": 0.2, "clip_high": 0.28}
SETTINGS = {"loss": LOSS, "correction": {"name": "tis", "cap": 2.0}}


class Tokens(SimpleNamespace):
    def with_columns(self, **columns):
        return Tokens(loss_mask=self.loss_mask, columns=self.columns | columns)


def grpo(logprobs, old_logprobs, rollout_logprobs, advantages, mask, **settings):
    columns = {
        "old_logprobs": old_logprobs, "rollout_logprobs": rollout_logprobs,
        "advantages": advantages,
    }  # fmt: skip
    loss = objective_of(algorithm_of(**settings)).loss
    return loss(logprobs, Tokens(loss_mask=mask, columns=columns))


def advantages_of(rewards, *, normalize_std):
    made = algorithm_of(advantage={"name": "grpo" if normalize_std else "group_mean"})
    rows = Rows(rewards.numpy(), np.ones(rewards.shape, np.int64))
    return torch.from_numpy(made.advantage.of_groups(rows))


def kl_to_reference(logprobs, ref_logprobs, mask):
    tokens = Tokens(loss_mask=mask, columns={"ref_logprobs": ref_logprobs})
    return Kl(name="k3").of_tokens(logprobs, tokens).loss


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
    loss, *_ = grpo(log_ratio * one, zero, zero, advantage * one, one.bool(), **SETTINGS)
    assert loss.item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("gap", "weight"), [(0.0, 1.0), (0.5, math.exp(0.5)), (3.0, 2.0)])
def test_importance_weight_is_the_ratio_to_the_sampler_up_to_the_cap(gap, weight):
    old = torch.tensor([-1.0])
    loss, metrics, _ = grpo(old, old, old - gap, torch.ones(1), torch.ones(1).bool(), **SETTINGS)
    assert loss.item() == pytest.approx(-weight, rel=1e-6)
    assert metrics["loss/importance_capped"].item() == float(gap == 3.0)


def test_importance_weights_carry_no_gradient():
    logprobs = torch.tensor([-1.0], requires_grad=True)  # old ones that are this very step's
    columns = {"old_logprobs": logprobs, "rollout_logprobs": torch.tensor([-1.5])}
    tokens = Tokens(loss_mask=torch.tensor([True]), columns=columns)
    weights, _ = Tis(cap=2.0).of_tokens(tokens)
    assert weights.item() == pytest.approx(math.exp(0.5)) and not weights.requires_grad


def test_garbage_under_the_mask_changes_neither_loss_nor_gradient():
    logprobs = torch.tensor([-1.0, float("-inf")], requires_grad=True)
    old, mask = torch.tensor([-1.0, float("nan")]), torch.tensor([True, False])
    rollout = torch.tensor([-1.0, float("inf")])
    advantages = torch.tensor([1.0, float("nan")])
    loss, metrics, _ = grpo(logprobs, old, rollout, advantages, mask, **SETTINGS)
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.0, 0.0]))
    assert all(math.isfinite(v) for v in metrics.values())


def test_micro_batches_add_up_to_one_batch():
    rng = torch.Generator().manual_seed(0)
    logprobs, old, rollout, advantages = torch.randn(4, 8, generator=rng)
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1], dtype=torch.bool)
    whole, *_ = grpo(logprobs, old, rollout, advantages, mask, **SETTINGS)
    parts = [
        grpo(logprobs[s], old[s], rollout[s], advantages[s], mask[s], **SETTINGS).loss
        for s in (slice(0, 3), slice(3, 8))
    ]
    torch.testing.assert_close(whole, sum(parts))


def test_advantages_of_a_hand_worked_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    centred = advantages_of(rewards, normalize_std=False)
    torch.testing.assert_close(centred[0], torch.tensor([0.5, -0.5, -0.5, 0.5]))
    scaled = advantages_of(rewards, normalize_std=True)
    torch.testing.assert_close(
        scaled[0], math.sqrt(3) / 2 * torch.tensor([1.0, -1.0, -1.0, 1.0]), rtol=1e-4, atol=0
    )
    assert scaled[1].abs().max() == 0  # nothing to learn from a group of equals


def test_a_sibling_without_a_reward_is_compared_with_nobody():
    """Means 2/3 and 0.1 of who has one; a group of one, and of none, has nothing to compare."""
    nan = math.nan
    rewards = torch.tensor(
        [[1.0, nan, 0.0, 1.0], [0.1, 0.1, nan, 0.1], [nan, 1, nan, nan], [nan] * 4]
    )
    third = 1 / 3
    centred = advantages_of(rewards, normalize_std=False)
    torch.testing.assert_close(centred[0], torch.tensor([third, 0.0, -2 * third, third]))
    scaled = advantages_of(rewards, normalize_std=True)
    deviation = math.sqrt(1 / 3)  # of 1, 0, 1: not of four numbers
    expected = torch.tensor([third, 0.0, -2 * third, third]) / deviation
    torch.testing.assert_close(scaled[0], expected, rtol=1e-5, atol=0)
    for worth in (centred, scaled):
        assert worth[1:].abs().max() == 0


@pytest.mark.parametrize(
    ("gap", "kl", "slope"),
    [
        (0.0, 0.0, 0.0),
        (math.log(2), 1 - math.log(2), -1.0),  # half as likely as under the reference: 2 - ln 2 - 1
        (-math.log(2), math.log(2) - 0.5, 0.5),  # twice as likely: 1/2 + ln 2 - 1
    ],
)
def test_kl_to_the_reference_of_a_hand_worked_token(gap, kl, slope):
    logprobs = torch.tensor([-3.0], requires_grad=True)
    found = kl_to_reference(logprobs, torch.tensor([-3.0 + gap]), torch.tensor([True]))
    found.backward()
    assert found.item() == pytest.approx(kl, abs=1e-6)
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-6)


def test_the_estimate_is_the_divergence_on_average_and_never_negative():
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    estimates = kl_to_reference(policy.log(), reference.log(), torch.ones(3).bool())
    assert (estimates >= 0).all()
    expected = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * estimates).sum(), expected)


def test_the_kl_term_adds_its_part_to_the_loss_and_0_only_measures():
    logprobs = torch.tensor([-1.0, -1.0, float("nan")], requires_grad=True)
    columns = {
        "old_logprobs": logprobs.detach(), "rollout_logprobs": logprobs.detach(),
        "advantages": torch.ones(3),
        "ref_logprobs": torch.tensor([-1.0 + math.log(2), -1.0, float("inf")]),
    }  # fmt: skip
    tokens = Tokens(loss_mask=torch.tensor([True, True, False]), columns=columns)

    def loss_with(**kl):
        made = algorithm_of(**SETTINGS, **kl)
        return objective_of(made, frozenset({"ref_logprobs"})).loss(logprobs, tokens)

    measured = loss_with()
    assert measured.loss.item() == pytest.approx(-2)
    assert measured.metrics["kl/mean"].item() == pytest.approx(1 - math.log(2))
    assert loss_with(kl={"name": "k3", "coefficient": 0.0}).loss.item() == measured.loss.item()
    pulled = loss_with(kl={"name": "k3", "coefficient": 0.1})
    assert pulled.loss.item() == pytest.approx(-2 + 0.1 * (1 - math.log(2)))
    pulled.loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.1, -1.0, 0.0]))


def test_a_policy_far_from_the_reference_has_a_finite_kl():
    logprobs = torch.tensor([-200.0], requires_grad=True)
    found = kl_to_reference(logprobs, torch.tensor([0.0]), torch.tensor([True]))
    found.backward()
    assert math.isfinite(found.item()) and math.isfinite(logprobs.grad.item())


def test_metrics_count_trained_tokens_only():
    """Three tokens: one beyond the clip, one sampled by an older policy, one beyond both."""
    log_ratio = torch.tensor([0.5, 0.0, -0.5, 0.5])
    gap = torch.tensor([0.0, 0.5, 3.0, 3.0])
    mask = torch.tensor([True, True, True, False])
    old = torch.full((4,), -1.0)
    _, metrics, _ = grpo(old + log_ratio, old, old - gap, torch.ones(4), mask, **SETTINGS)
    assert metrics["loss/clip_fraction"].item() == 1  # the third is below, and pulled up
    assert metrics["loss/importance_capped"].item() == 1
    assert metrics["loss/importance_mean"].item() == pytest.approx(1 + math.exp(0.5) + 2, rel=1e-6)
    kl = math.exp(0.5) - 1 - 0.5 + math.exp(-0.5) - 1 + 0.5  # of the trained tokens: r - 1 - ln r
    assert metrics["loss/approx_kl"].item() == pytest.approx(kl, rel=1e-5)
