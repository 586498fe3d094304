"""Advantages: by hand, a group at a time."""

import itertools
import math
import statistics

import numpy as np
import pytest

from relax_hpc.algorithms.advantages.batch_std import BatchStd
from relax_hpc.algorithms.advantages.gpg import Gpg
from relax_hpc.algorithms.advantages.group_mean import GroupMean
from relax_hpc.algorithms.advantages.grpo import Grpo
from relax_hpc.algorithms.advantages.max_rl import MaxRl
from relax_hpc.algorithms.advantages.opo import Opo
from relax_hpc.algorithms.advantages.pass_k import PassK
from relax_hpc.algorithms.advantages.reinforce_pp import ReinforcePp
from relax_hpc.algorithms.advantages.reinforce_pp_baseline import ReinforcePpBaseline
from relax_hpc.algorithms.advantages.rloo import Rloo
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


def test_group_mean_by_hand():
    assert of(GroupMean(), [[1, 0, 0, 1], [1, 1, 1, 1], [3, NAN, 0, 0]]) == [
        [0.5, -0.5, -0.5, 0.5],
        [0, 0, 0, 0],
        [2, 0, -1, -1],
    ]


def test_grpo_by_hand():
    # Squares 4 * 0.25 by 3; a group of one reward, and one of equals, are worth nothing.
    scale = math.sqrt(1 / 3)
    rewards = [[1, 0, 0, 1], [5, NAN, NAN, NAN], [0.1, 0.1, 0.1, 0.1]]
    assert of(Grpo(), rewards) == [
        near([0.5 / scale, -0.5 / scale, -0.5 / scale, 0.5 / scale]),
        [0] * 4,
        [0] * 4,
    ]


def test_batch_std_by_hand():
    # Rewards 1 0 1 1 over the batch: variance 0.25.
    assert of(BatchStd(), [[1, 0], [1, 1]]) == [near([1, -1]), [0, 0]]


def test_rloo_by_hand():
    assert of(Rloo(), [[1, 0, 0, 0], [1, NAN, NAN, 0]]) == [
        near([1, -1 / 3, -1 / 3, -1 / 3]),
        near([1, 0, 0, -1]),
    ]


def test_max_rl_by_hand():
    assert of(MaxRl(), [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, NAN, 0]]) == [
        near([3, -1, -1, -1]),
        [0, 0, 0, 0],
        near([0.5, 0.5, 0, -1]),
    ]


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


def test_pass_k_of_2_right_among_8_and_teams_of_4():
    right, wrong = near(0.5222330), near(-0.1740777)
    assert of(PassK(), [[1, 1, 0, 0, 0, 0, 0, 0]]) == [[right] * 2 + [wrong] * 6]


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


def test_reinforce_pp_begins_with_the_reward_and_its_baseline_variant_with_the_groups():
    assert of(ReinforcePp(), [[2, NAN]]) == [[2, 0]]
    assert of(ReinforcePpBaseline(), [[2, 0]]) == [[1, -1]]


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
