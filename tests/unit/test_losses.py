"""Losses, advantages, means over tokens and sequences, the weight of the entropy: by hand."""

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from relax_hpc.algorithms.aggregation import row_weights, token_weights
from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.composition import objective_of, value_loss
from relax_hpc.algorithms.entropy import EntropyState
from relax_hpc.algorithms.estimates import estimate_gae
from relax_hpc.algorithms.segments import mean_over, sum_over

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


@pytest.mark.parametrize(("gap", "weight"), [(0.0, 1.0), (0.5, math.exp(0.5)), (3.0, 2.0)])
def test_importance_weight_is_the_ratio_to_the_sampler_up_to_the_cap(gap, weight):
    old = torch.tensor([-1.0])
    loss, metrics, _ = grpo(old, old, old - gap, torch.ones(1), torch.ones(1).bool(), **SETTINGS)
    assert loss.item() == pytest.approx(-weight, rel=1e-6)
    assert metrics["loss/importance_capped"].item() == float(gap == 3.0)


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


LENGTHS = np.array([2, 6, 4, 0])
GROUPS = np.array([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        ("sequence_sum", (2 + 12 + 4 + 0) / 4),
        ("prompt", ((2 + 12) / 8 + 4 / 4) / 2),
        ("constant", (2 + 12 + 4) / 8 / 4),
    ],
)
def test_weights_make_the_means_that_they_are_named_after(mean, expected):
    """With a loss of 1 per token, and twice that in the second row, over 4 rows of 2 prompts."""
    weights, counts = row_weights(mean, LENGTHS, GROUPS, 8)
    loss = LENGTHS * np.array([1, 2, 1, 1])
    assert (weights * loss).sum() / counts.sum() == pytest.approx(expected)


def test_a_mean_over_rows_is_over_their_trained_tokens_and_other_means_do_not_look():
    """Three trained of five tokens, one of one, none of two."""
    mask = torch.tensor([True, True, False, False, True, True, False, False])
    ids = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2])
    tokens = Valued(mask, ids, torch.zeros(3), {"weights": torch.ones(8)})
    found = token_weights("sequence", tokens)
    assert found.tolist() == pytest.approx([1 / 3] * 5 + [1] * 3)
    assert (found * mask).sum().item() == pytest.approx(2)  # rows with a trained token
    for mean in ("sequence_sum", "prompt", "constant"):
        assert token_weights(mean, tokens) is tokens.columns["weights"]
    assert token_weights("token", tokens._replace(columns={})) is None


def test_sums_over_sequences_heed_the_mask_and_send_the_gradient_home():
    nan = torch.nan
    values = torch.tensor([nan, 1.0, 3.0, 5.0, nan], requires_grad=True)
    mask = torch.tensor([False, True, True, True, False])
    ids = torch.tensor([0, 0, 0, 1, 2])
    assert sum_over(values, ids, mask, 3).tolist() == [4, 5, 0]
    means = mean_over(values, ids, mask, 3)
    assert means.tolist() == [2, 5, 0]
    (means * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert values.grad.tolist() == [0, 0.5, 0.5, 10, 0]


class Valued(NamedTuple):
    loss_mask: torch.Tensor
    sequence_ids: torch.Tensor
    groups: torch.Tensor
    columns: dict

    @classmethod
    def of(cls, masks, **columns):
        ids = [torch.full((len(mask),), number) for number, mask in enumerate(masks)]
        return cls(
            torch.tensor([bit for mask in masks for bit in mask]) != 0,
            torch.cat(ids),
            torch.zeros(len(masks), dtype=torch.int64),
            {name: torch.tensor(values) for name, values in columns.items()},
        )


def by_loops(values, rewards, masks, gamma, lam, alpha=0.0):
    """The same, backwards over every sequence, a token at a time."""
    found, at = [], 0
    for mask in masks:
        decay = max(0.0, 1 - 1 / (alpha * sum(mask))) if alpha and sum(mask) else lam
        out = [0.0] * len(mask)
        advantage = value = to_come = 0.0
        for t in reversed(range(len(mask))):
            if not mask[t]:
                continue
            reward = float(rewards[at + t]) - to_come
            delta = reward + gamma * value - float(values[at + t])
            advantage = out[t] = delta + gamma * decay * advantage
            value, to_come = float(values[at + t]), float(rewards[at + t])
        found += out
        at += len(mask)
    return torch.tensor(found, dtype=torch.float64)


def test_a_chain_of_three_with_a_tools_token_between_is_worth_what_it_is_by_hand():
    """V = 0.2, 0.5, 0.6 and reward 1: with gamma 0.9 and lam 0.8 the deltas are
    0.45 - 0.2 = 0.25, 0.54 - 0.5 = 0.04, 1 - 0.6 = 0.4, and 0.72 goes from one to the one before.
    """
    tokens = Valued.of([[0, 1, 1, 0, 0, 1]])
    values = torch.tensor([9.0, 0.2, 0.5, math.nan, -7.0, 0.6])
    found = estimate_gae(values, torch.full((6,), 1.0), tokens, gamma=0.9, lam=0.8)
    third = 0.4
    second = 0.04 + 0.72 * third
    first = 0.25 + 0.72 * second
    assert found.tolist() == pytest.approx([0, first, second, 0, 0, third], abs=1e-6)
    assert first == pytest.approx(0.48616)


def test_random_batches_equal_a_loop_over_tokens():
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        masks = [
            (torch.rand(int(n), generator=generator) < 0.7).int().tolist()
            for n in torch.randint(1, 9, (5,), generator=generator)
        ]
        tokens = Valued.of(masks)
        count = len(tokens.loss_mask)
        values, rewards = torch.randn(2, count, generator=generator, dtype=torch.float64)
        gamma, lam = torch.rand(2, generator=generator).tolist()
        for alpha in (0.0, 0.5):
            found = estimate_gae(values, rewards, tokens, gamma=gamma, lam=lam, alpha=alpha)
            expected = by_loops(values, rewards, masks, gamma, lam, alpha)
            assert torch.allclose(found, expected, atol=1e-9)


def test_the_value_loss_takes_the_worse_of_the_clipped_and_the_free_value():
    """R = 1; V_old = 0, 0, 0.9; V = 0.5, 0.1, 1.3: clipped to 0.2, 0.1, 1.1."""
    tokens = Valued.of([[1], [1], [1], [0]], values=[0.0, 0.0, 0.9, 7.0], advantages=[1.0] * 4)
    values = torch.tensor([0.5, 0.1, 1.3, math.nan], requires_grad=True)
    output = value_loss(clip=0.2, gamma=1.0, lam=1.0)(values, tokens)
    assert output.loss.item() == pytest.approx((0.8**2 + 0.9**2 + 0.3**2) / 2)
    output.loss.backward()
    assert values.grad.tolist() == pytest.approx([0.0, -0.9, 0.3, 0.0])
    assert output.metrics["value/clipped"] == 1
    assert output.metrics["value/square_error"].item() == pytest.approx(0.25 + 0.81 + 0.09)
    free = value_loss(clip=0.0, gamma=1.0, lam=1.0)(values.detach(), tokens)
    assert free.loss.item() == pytest.approx((0.5**2 + 0.9**2 + 0.3**2) / 2)


def weights(entropy, measured):
    """Weights of the steps that follow on these entropies, the first step's in front."""
    part = algorithm_of(entropy=entropy).entropy
    state, found = part.first(), [part.first().weight]
    for each in measured:
        state = part.after(state, each)
        found.append(state.weight)
    return found


def test_an_adaptive_one_rises_below_the_target_falls_above_and_rests_there():
    """The coefficient is 0.1, 0.2, 0.3, 0.2, 0.1, 0.2, 0.1; above the target none is applied."""
    entropy = {"name": "adaptive", "target": 0.5, "step": 0.1, "largest": 0.3}
    measured = [0.4, 0.4, 0.1, 0.6, 0.7, 0.2, 0.5]
    found = weights(entropy, measured)
    assert found == pytest.approx([0, 0.1, 0.2, 0.3, 0, 0, 0.2, 0.1])
    part = algorithm_of(entropy=entropy | {"step": 0.2}).entropy
    assert part.after(EntropyState(0.2, 0.2), 0.4).coefficient == 0.3
    assert part.after(EntropyState(0.1, 0.1), 2.0).coefficient == 0.0
