"""Advantages by hand, whitened over a batch; means over rows; distances from the anchor."""

import itertools
import math
import statistics
from functools import partial

import numpy as np
import pytest
import torch
from batches import alone, on_ranks, pack, padded, random_batch
from batches import tokens_of as packed

from relax_hpc.algorithms import ratios
from relax_hpc.algorithms.advantages.batch_std import BatchStd
from relax_hpc.algorithms.advantages.gae import Gae
from relax_hpc.algorithms.advantages.gpg import Gpg
from relax_hpc.algorithms.advantages.group_mean import GroupMean
from relax_hpc.algorithms.advantages.grpo import Grpo
from relax_hpc.algorithms.advantages.max_rl import MaxRl
from relax_hpc.algorithms.advantages.opo import Opo
from relax_hpc.algorithms.advantages.pass_k import PassK
from relax_hpc.algorithms.advantages.reinforce_pp import ReinforcePp
from relax_hpc.algorithms.advantages.reinforce_pp_baseline import ReinforcePpBaseline
from relax_hpc.algorithms.advantages.rloo import Rloo
from relax_hpc.algorithms.aggregation import row_weights
from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.composition import objective_of
from relax_hpc.algorithms.part import Rows
from relax_hpc.errors import ConfigError

NAN = math.nan
BY_NAME = {"ids": lambda part: part.name}
BY_GROUP = [GroupMean(), Grpo(), BatchStd(), Rloo(), MaxRl(), PassK(k=2), Opo(), Gpg()]


def of(advantage, rewards, lengths=None):
    rewards = np.array(rewards, np.float64)
    lengths = np.ones(rewards.shape, np.int64) if lengths is None else np.array(lengths)
    return advantage.of_groups(Rows(rewards, lengths)).tolist()


def near(values):
    return pytest.approx(values, rel=1e-5, abs=1e-6)


HALF = 0.5 / math.sqrt(1 / 3)
BY_HAND = [
    (GroupMean(), [[1, 0, 0, 1], [1, 1, 1, 1], [3, NAN, 0, 0]],
     [[0.5, -0.5, -0.5, 0.5], [0] * 4, [2, 0, -1, -1]]),
    # Squares 4 * 0.25 by 3; a group of one reward, and one of equals, are worth nothing.
    (Grpo(), [[1, 0, 0, 1], [5, NAN, NAN, NAN], [0.1] * 4],
     [[HALF, -HALF, -HALF, HALF], [0] * 4, [0] * 4]),
    # Rewards 1 0 1 1 over the batch: variance 0.25.
    (BatchStd(), [[1, 0], [1, 1]], [[1, -1], [0, 0]]),
    (Rloo(), [[1, 0, 0, 0], [1, NAN, NAN, 0]], [[1, -1 / 3, -1 / 3, -1 / 3], [1, 0, 0, -1]]),
    (MaxRl(), [[1, 0, 0, 0], [0] * 4, [1, 1, NAN, 0]],
     [[3, -1, -1, -1], [0] * 4, [0.5, 0.5, 0, -1]]),
    (PassK(), [[1, 1, 0, 0, 0, 0, 0, 0]], [[0.5222330] * 2 + [-0.1740777] * 6]),  # teams of 4
    (ReinforcePp(), [[2, NAN]], [[2, 0]]), (ReinforcePpBaseline(), [[2, 0]], [[1, -1]]),
]  # fmt: skip


@pytest.mark.parametrize(("advantage", "rewards", "expected"), BY_HAND)
def test_advantages_by_hand(advantage, rewards, expected):
    assert of(advantage, rewards) == [near(row) for row in expected]


def test_max_rl_refuses_a_reward_below_0():
    with pytest.raises(ConfigError, match=r"max_rl.*reward of -0.5; use rewards of at least 0"):
        of(MaxRl(), [[1, -0.5]])


def test_opo_by_hand():
    # The long one weighs three times: the baseline is 0.75.
    assert of(Opo(), [[1, 0], [0.1, 0.1], [1, NAN]], [[3, 1], [7, 3], [2, 9]]) == [
        near([0.25, -0.75]),
        [0, 0],
        [0, 0],
    ]


def test_gpg_is_the_papers_factor_times_group_mean_under_a_mean_that_counts_all():
    rewards = [[1, 0], [1, 1], [0, 0], [0, 1]]
    worth = np.array(of(Gpg(), rewards))
    mean_over_trained = np.abs(worth[[0, 3]]).sum() / 4
    papers = np.abs(worth).sum() / 8 * (8 / (8 - 4))
    assert mean_over_trained == papers == 0.5


@pytest.mark.parametrize(("siblings", "k"), [(2, 1), (4, 2), (6, 4), (7, 3), (5, 5)])
def test_pass_k_is_the_mean_over_all_teams(siblings, k):
    for right in range(siblings + 1):
        rewards = [1.0] * right + [0.0] * (siblings - right)
        teams = list(itertools.combinations(range(siblings), k))
        won = [float(any(rewards[one] for one in team)) for team in teams]
        mean, deviation = statistics.fmean(won), statistics.pstdev(won)
        expected = [
            statistics.fmean(
                (value - mean) / deviation if deviation else 0.0
                for team, value in zip(teams, won, strict=True)
                if one in team
            )
            for one in range(siblings)
        ]
        assert of(PassK(k=k), [rewards]) == [near(expected)]


def test_pass_k_counts_those_that_have_a_reward():
    some = of(PassK(k=2), [[1, NAN, 0, 0, NAN]])
    assert some[0][1] == some[0][4] == 0
    assert [some[0][at] for at in (0, 2, 3)] == of(PassK(k=2), [[1, 0, 0]])[0]
    assert of(PassK(k=3), [[1, NAN, 0]]) == [[0, 0, 0]]


@pytest.mark.parametrize("advantage", BY_GROUP, **BY_NAME)
def test_neither_the_order_of_groups_nor_that_of_siblings_matters(advantage):
    random = np.random.default_rng(1)
    rewards, lengths = random.integers(0, 2, (5, 6)) * 1.0, random.integers(1, 9, (5, 6))
    rewards[2, 3] = np.nan
    worth = np.array(of(advantage, rewards, lengths))
    groups, siblings = random.permutation(5), random.permutation(6)
    moved = of(advantage, rewards[groups][:, siblings], lengths[groups][:, siblings])
    np.testing.assert_allclose(moved, worth[groups][:, siblings], atol=1e-12)
    if advantage.needs().scope == "group":
        halves = [of(advantage, rewards[part], lengths[part]) for part in (slice(2), slice(2, 5))]
        np.testing.assert_allclose(np.concatenate(halves), worth, atol=1e-12)


@pytest.mark.parametrize("advantage", BY_GROUP, **BY_NAME)
def test_a_group_of_equals_is_worth_exactly_nothing(advantage):
    """So that it is known by its advantages which groups have none."""
    for reward in (0.1, 1 / 3, 0.7, 1.0):
        for siblings in (3, 7, 10):
            rows = Rows(
                np.full((1, siblings), reward, np.float32), np.arange(1, siblings + 1)[None]
            )
            assert not advantage.of_groups(rows).any()
            assert advantage.of_groups(rows).dtype == np.float32


def test_the_effective_sample_of_ratios_by_hand():
    # Ratios 1, 1 and 4: 36 / 9 by 18 / 3.
    metrics = {"loss": 0.5, "loss/ratio": 2.0, "loss/ratio_squared": 6.0}
    ratios.settle(metrics)
    assert metrics == {"loss": 0.5, "loss/ratio": 2.0, "loss/effective_sample": 4 / 6}


def test_the_distances_of_tokens_by_hand_with_garbage_under_the_mask():
    for seed in range(5):
        batch = random_batch(seed)
        tokens = pack(batch, garbage=True).over("rollout")
        found = ratios.spread(tokens.logprobs.requires_grad_(), tokens)
        assert not any(values.requires_grad for values in found.values())
        for at, place in enumerate(tokens.places):
            trained = place is not None and batch.mask[place]
            log_r = 0.0
            if trained:
                log_r = batch.columns["logprobs"][place] - batch.columns["rollout_logprobs"][place]
            ratio = math.exp(log_r)
            assert {name: values[at].item() for name, values in found.items()} == {
                "loss/approx_kl": pytest.approx(ratio - 1 - log_r),
                "loss/log_ratio_squared": pytest.approx(log_r**2),
                "loss/ratio": pytest.approx(ratio),
                "loss/ratio_squared": pytest.approx(ratio**2),
            }


PRESETS = ["grpo", "sapo", "gspo", "gmpo"]


def sums_of(preset, tokens):
    """(loss, denominator, gradient by token) of a micro-batch with the weights of its rows."""
    algorithm = algorithm_of(preset=preset)
    groups = tokens.groups.clamp(min=0).numpy()
    lengths = tokens.sequence_ids.bincount(minlength=len(groups)).numpy()
    weighed = row_weights(algorithm.aggregation, lengths, groups, 16)._asdict()
    columns = {name: torch.tensor(rows)[tokens.sequence_ids] for name, rows in weighed.items()}
    logprobs = tokens.logprobs.clone().requires_grad_()
    loss, _, count = objective_of(algorithm).loss(logprobs, tokens.with_columns(**columns))
    loss.backward()
    return loss.item(), count.item(), logprobs.grad


def tokens_of(mask, worth):
    """Rows of these masks, with ratios of 1, and `worth` on all tokens of each."""
    ids = torch.tensor([row for row, line in enumerate(mask) for _ in line])
    same = torch.full((len(ids),), -1.0, dtype=torch.float64)
    advantages = torch.tensor(worth, dtype=torch.float64)[ids]
    columns = {"rollout_logprobs": same, "old_logprobs": same, "advantages": advantages}
    flat = torch.tensor([trained == 1 for line in mask for trained in line])
    return packed(columns, same, ids, flat)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_tool_said_does_not_make_a_row_weigh_less(preset):
    """Two trained tokens of 2, and of 20: a half for each row, in the second three times as much.

    By all tokens the second row's would be 2 / 20 of that, 0.075 each.
    """
    tokens = tokens_of([[1, 1], [1, *[0] * 18, 1]], [1.0, 3.0])
    loss, count, gradient = sums_of(preset, tokens)
    assert loss == pytest.approx(-8 if preset == "sapo" else -4) and count == 2
    assert (gradient / count)[[0, 1, 2, 21]].tolist() == pytest.approx([-0.25, -0.25, -0.75, -0.75])
    assert not gradient[3:21].any()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_row_without_a_trained_token_is_no_row_of_the_mean(preset):
    """The same gradient with it as without: a half for each of the others."""
    loss, count, gradient = sums_of(preset, tokens_of([[1], [0, 0, 0], [1, 0, 1]], [1.0, 9.0, 3.0]))
    assert np.isfinite(loss) and count == 2
    assert (gradient / count).tolist() == pytest.approx([-0.5, 0, 0, 0, -0.75, 0, -0.75])
    loss, count, gradient = sums_of(preset, tokens_of([[0, 0]], [1.0]))
    assert (loss, count) == (0, 0) and not gradient.any()


@pytest.mark.parametrize("preset", PRESETS)
def test_micro_batches_order_and_garbage_do_not_matter(preset):
    for seed in range(60):
        batch = random_batch(seed)
        rows = list(range(len(batch.lengths)))
        loss, count, gradient = sums_of(preset, pack(batch))
        whole = dict(zip(pack(batch).places, gradient.tolist(), strict=True))
        for parts in ([rows[::-1]], [[row] for row in rows], [rows[::2], rows[1::2]]):
            micro_batches = [pack(batch, part, garbage=True) for part in parts if part]
            found = [sums_of(preset, tokens) for tokens in micro_batches]
            assert sum(each[0] for each in found) == pytest.approx(loss, abs=1e-9)
            assert sum(each[1] for each in found) == pytest.approx(count)
            for tokens, (*_, gradient) in zip(micro_batches, found, strict=True):
                for place, value in zip(tokens.places, gradient.tolist(), strict=True):
                    assert place is None or value == pytest.approx(whole[place], abs=1e-9)


PARTS = [ReinforcePp(), ReinforcePpBaseline(), Gae(whiten=True)]
NAMES = lambda part: part.name  # noqa: E731


def whitened(part, batch, parts, total=alone):
    """[B, L] advantages of rows that are spread over micro-batches."""
    micro_batches = part.prepare([pack(batch, rows) for rows in parts], total)
    return sum(padded(tokens, tokens.columns["advantages"], batch) for tokens in micro_batches)


def share_of(part, batch, rows, total):
    return whitened(part, batch, [rows], total)


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_it_equals_a_second_formulation_on_200_batches(part):
    for seed in range(200):
        batch = random_batch(seed)
        rows = range(len(batch.lengths))
        worth = batch.columns["advantages"]
        trained = worth[batch.mask].tolist()
        expected = np.zeros(batch.mask.shape)
        if trained:
            variance = statistics.variance(trained) if len(trained) > 1 else 0.0
            mean = statistics.fmean(trained)
            expected[batch.mask] = [(x - mean) / (variance + 1e-8) ** 0.5 for x in trained]
        np.testing.assert_allclose(whitened(part, batch, [rows]), expected, atol=1e-6)


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_micro_batches_order_and_ranks_do_not_matter(part):
    for seed in range(10):
        batch = random_batch(seed)
        rows = list(range(len(batch.lengths)))
        expected = whitened(part, batch, [rows])
        np.testing.assert_allclose(whitened(part, batch, [[row] for row in rows[::-1]]), expected)
        shares = [rows[0::2], rows[1::2]]
        ranks = on_ranks(shares, partial(share_of, part, batch))
        np.testing.assert_allclose(sum(ranks), expected, atol=1e-12)


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_garbage_under_the_mask_is_inert(part):
    batch = random_batch(5)
    (clean,), (found,) = (part.prepare([pack(batch, garbage=x)], alone) for x in (False, True))
    assert torch.equal(found.columns["advantages"], clean.columns["advantages"])
