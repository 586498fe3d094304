"""Which groups teach, the worth of rows, the ranks that train them, and the figures: by hand."""

import math
import threading

import numpy as np
import pytest
from role_fakes import config

from relax_hpc.algorithms.groups import AsSampled
from relax_hpc.algorithms.part import Advantage
from relax_hpc.bus.plan import PlanRecord, ShardRange
from relax_hpc.bus.reader import BatchIndex
from relax_hpc.bus.skips import GroupVerdict
from relax_hpc.errors import BusError, ConfigError
from relax_hpc.roles.actor.rank0 import Lookout
from relax_hpc.roles.dealing.portions import (
    Batch,
    Comparison,
    check_errors,
    judge_of,
    shards_of,
    share_of,
    values_of,
)
from relax_hpc.schema import FinishReason

# Three groups of four: half of them right, all of them, one of them.
REWARDS = [1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 0]
PROMPTS = [2] * 12
RESPONSES = [3, 5, 2, 4, 1, 1, 1, 1, 6, 2, 3, 3]


class Reader:
    """Knows the row columns of some portions."""

    def __init__(self, *indices):
        self.indices = list(indices)
        self.known = [{}] * len(indices)

    def parts(self, record):
        return self.known[record.portion]

    def index(self, record):
        return self.indices[record.portion]


def index(rewards=REWARDS, prompts=PROMPTS, responses=RESPONSES, oldest=None, guid=0, failed=()):
    count = len(rewards)
    oldest = oldest or [0] * count
    return BatchIndex(
        guid=np.arange(count, dtype=np.int64) // 4 + guid,
        sibling=np.arange(count, dtype=np.int32) % 4,
        segment=np.zeros(count, np.int32),
        rewards=np.array(rewards, np.float32),
        reward_error=np.isin(np.arange(count), failed).astype(np.uint8),
        prompt_len=np.array(prompts, np.int32),
        response_len=np.array(responses, np.int32),
        policy_version_min=np.array(oldest, np.int32),
        policy_version_max=np.array(oldest, np.int32) + 1,
        finish=np.zeros(count, np.uint8),
    )


def record(groups=3, portion=0, last=True, step=5):
    parts = [
        ShardRange("rollout-0", 1, n // 2, f"u{n // 2}", 4 * n, 4 * n + 4) for n in range(groups)
    ]
    return PlanRecord(step, list(range(groups)), parts, 4 * groups, 0, 0, portion, last)


def batch_of(*indices, **settings):
    settings = {"actor__tokens_per_micro_batch": 100, **settings}
    return Batch(config(rollout__samples_per_prompt=4, **settings), Reader(*indices))


PULLED = {"algorithm__kl__coefficient": 0.1, "reference__placement": "actor"}
CENTRED = [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0, -0.25, -0.25, 0.75, -0.25]
# Deviations: sqrt(1/3) of the first group, 1/2 of the third.
HALF = math.sqrt(3) / 2
SCALED = [HALF, -HALF, -HALF, HALF, 0, 0, 0, 0, -0.5, -0.5, 1.5, -0.5]


@pytest.mark.parametrize(("normalize", "expected"), [(False, CENTRED), (True, SCALED)])
@pytest.mark.parametrize(
    ("settings", "kept"),
    [({}, [0, 1, 2, 3, 8, 9, 10, 11]), (PULLED, list(range(12)))],
    ids=["policy", "policy and KL"],
)
def test_rows_are_worth_what_sets_them_apart_and_who_teaches_nothing_stays_only_for_a_kl_term(
    normalize, expected, settings, kept
):
    batch = batch_of(
        index(), **settings, algorithm__advantage__name="grpo" if normalize else "group_mean"
    )
    portion = batch.deal(record())
    np.testing.assert_allclose(portion.columns["advantages"], expected, rtol=1e-5)
    [micro_batches] = portion.micro_batches
    assert sorted(row for rows in micro_batches for row in rows) == kept
    share = share_of(portion, 0)
    assert share.rows == kept
    np.testing.assert_allclose(share.columns["advantages"], np.array(expected)[kept], rtol=1e-5)


MASKED = {"reward__on_error": "mask"}


def test_a_reward_that_failed_is_zero_or_is_left_out_of_group_and_batch():
    """Of 1 0 0 1 the first failed: 1/3 of 0 0 1 is the baseline; the rewards' mean is 6/11."""
    failed = index([0, *REWARDS[1:]], failed=[0])
    assert batch_of(failed).deal(record()).columns["advantages"][:4].tolist() == [
        -0.25, -0.25, -0.25, 0.75
    ]  # fmt: skip
    batch = batch_of(failed, **MASKED)
    portion = batch.deal(record())
    third = 1 / 3
    expected = [0, -third, -third, 2 * third, *CENTRED[4:]]
    np.testing.assert_allclose(portion.columns["advantages"], expected, rtol=1e-6)
    assert share_of(portion, 0).rows == [1, 2, 3, 8, 9, 10, 11]
    said = batch.describe(5)
    assert said["reward/mean"] == pytest.approx(6 / 11)
    assert said["reward/errors"] == pytest.approx(1 / 12)


def test_what_failed_is_not_trained_on_for_a_kl_term_either():
    portion = batch_of(index(failed=[0, 5]), **MASKED, **PULLED).deal(record())
    assert share_of(portion, 0).rows == [1, 2, 3, 4, *range(6, 12)]


def test_a_group_of_which_all_failed_teaches_nothing_and_is_not_solved():
    batch = batch_of(index([0] * 4 + REWARDS[4:], failed=[0, 1, 2, 3]), **MASKED)
    assert share_of(batch.deal(record()), 0).rows == [8, 9, 10, 11]
    said = batch.describe(5)
    assert (said["groups/solved"], said["groups/teaching"]) == (1 / 3, 1 / 3)
    nobody = batch_of(index([0] * 12, failed=range(12)), **MASKED)
    assert share_of(nobody.deal(record()), 0).rows == []
    said = nobody.describe(5)
    assert "reward/mean" not in said and said["reward/errors"] == 1.0


def test_a_row_that_is_worth_its_group_s_mean_counts_in_a_group_that_teaches():
    """DAPO's 1 / sum of |o_i| is over all siblings, a 0.5 among 0, 0.5, 1 with them."""
    rewards = [0, 0.5, 1, 0.5, *[0.5] * 4, 1, 0, 0, 0]
    found = index(rewards, responses=[10, 100, 10, 100, *[5] * 4, 1, 2, 3, 4])
    settings = config(algorithm__preset="dapo", rollout__samples_per_prompt=4).algorithm
    assert settings.aggregation == "prompt"
    columns, teaching = values_of(found, Comparison(settings, 4, longest=9000))
    assert teaching.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert columns["advantages"][:4].tolist()[1::2] == [0, 0]
    np.testing.assert_allclose(columns["weights"][:4], [1 / 220] * 4)
    np.testing.assert_allclose(columns["weights"][8:], [1 / 10] * 4)
    assert columns["counts"].sum() == 2


class Plain(Advantage):
    def of_groups(self, rows):
        return rows.rewards - rows.rewards.mean(1)[:, None]


def test_an_algorithm_that_cannot_do_without_a_sibling_is_refused_by_name():
    check_errors(config().algorithm)
    settings = config().algorithm.model_copy(update={"advantage": Plain(name="plain")})
    with pytest.raises(ConfigError, match=r"algorithm.advantage.name = 'plain': gives siblings"):
        check_errors(settings)
    with pytest.raises(ConfigError, match=r"set reward.on_error to \"zero\""):
        values_of(index(failed=[0]), Comparison(settings, 4, longest=8, masks_errors=True))


def test_every_rank_has_the_advantages_of_its_own_rows_and_micro_batches_within_the_budget():
    settings = {"actor__layout__data_parallel": 2, "actor__tokens_per_micro_batch": 14}
    portion = batch_of(index(), **settings).deal(record())
    shares = [share_of(portion, rank) for rank in range(2)]
    assert sorted(shares[0].rows + shares[1].rows) == [0, 1, 2, 3, 8, 9, 10, 11]
    lengths = np.add(PROMPTS, RESPONSES)
    for rank, share in enumerate(shares):
        assert share.rows == sorted(share.rows)
        np.testing.assert_allclose(share.columns["advantages"], np.array(CENTRED)[share.rows])
        for mine, all_of_them in zip(share.micro_batches, portion.micro_batches[rank], strict=True):
            assert [share.rows[place] for place in mine] == all_of_them
            assert lengths[all_of_them].sum() <= 14
    # 44 tokens in rows of 4 to 8 are dealt evenly.
    assert [lengths[share.rows].sum() for share in shares] == [22, 22]


def test_a_row_longer_than_a_micro_batch_is_refused_but_not_one_that_is_left_out():
    long = [5] * 4 + [50] * 4 + [5] * 4  # of the group that teaches nothing
    batch_of(index(responses=long), actor__tokens_per_micro_batch=20).deal(record())
    with pytest.raises(ConfigError, match="a trajectory has 52 tokens"):
        batch_of(index(responses=long), actor__tokens_per_micro_batch=20, **PULLED).deal(record())


def test_a_later_portion_goes_to_who_had_less_of_the_earlier_one():
    uneven = index([1, 0, 0, 0], [1] * 4, [59, 9, 9, 9])  # 60 against 30, then 4 x 10
    small = index([1, 0, 0, 0], [1] * 4, [9, 9, 9, 9], guid=1)
    batch = batch_of(uneven, small, actor__layout__data_parallel=2)
    first = batch.deal(record(1, 0, last=False))
    [light] = [rank for rank in range(2) if share_of(first, rank).rows != [0]]
    second = batch.deal(record(1, 1))
    assert len(share_of(second, light).rows) >= 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_mini_batches_are_whole_groups_in_order_and_alike_on_all_ranks(ranks):
    """Of three groups the second teaches nothing: with two, each is a mini-batch of its own."""
    for asked, groups in ((1, [[0, 2]]), (2, [[0], [2]]), (3, [[0], [2]])):
        batch = batch_of(
            index(), algorithm__mini_batches=asked, schedule__prompts_per_step=3,
            actor__tokens_per_micro_batch=12, actor__layout__data_parallel=ranks,
        )  # fmt: skip
        portion = batch.deal(record())
        sizes = portion.mini_batches
        assert bool(sizes) is (asked > 1)
        for size, expected in zip(sizes or [len(portion.micro_batches[0])], groups, strict=True):
            mine = [[rank.pop(0) for _ in range(size)] for rank in portion.micro_batches]
            rows = sorted(row for rank in mine for batch in rank for row in batch)
            assert rows == [4 * group + sibling for group in expected for sibling in range(4)]
        assert not any(portion.micro_batches)
        assert batch.describe(5)["batch/micro_batches"] == sum(sizes) or not sizes


def test_parts_of_a_reward_are_means_over_the_episodes_of_the_batch_that_have_them():
    """Four episodes of two rows, then one of one row; the first row of each says its parts."""
    nan = np.nan
    segments = np.array([0, 1] * 4, np.int32)
    first = index([1] * 8, [3] * 8, [2] * 8)._replace(segment=segments)
    second = index([1] * 4, [3] * 4, [2] * 4, guid=1)
    reader = Reader(first, second)
    reader.known = [
        {"right": np.float32([1, 9, 0, 9, 1, 9, nan, nan]), "none": np.float32([nan] * 8)},
        {"right": np.float32([0, 0, 0, 1]), "short": np.float32([-1, nan, nan, -3])},
    ]
    batch = Batch(config(), reader)
    for portion in (record(2, 0, last=False), record(1, 1)):
        batch.deal(portion)
    said = {name: value for name, value in batch.describe(5).items() if name.startswith("parts/")}
    assert said == {"parts/right": pytest.approx(3 / 7), "parts/short": -2.0}


def test_what_is_said_of_a_batch_is_of_all_its_portions():
    first = index(REWARDS, oldest=[4] * 4 + [3] * 4 + [2] * 4)
    second = index([1, 1, 1, 1], [3] * 4, [7] * 4, oldest=[1] * 4, guid=3)
    late = {"schedule__over_age": "mask", "schedule__max_staleness": 2}
    batch = batch_of(first, second, actor__tokens_per_micro_batch=24, **late)
    for portion in (record(3, 0, last=False), record(1, 1)):
        batch.deal(portion)
    assert batch.describe(5) == {
        "policy_version": 5,
        "reward/mean": (7 + 4) / 16,
        "reward/errors": 0.0,
        "staleness/mean": (0 + 1 + 2 + 3) / 4,  # step 5 trains policy 4
        "staleness/max": 3,
        "staleness/over_age": 4 / 16,
        "num_trajectories": 16,
        "num_tokens": 24 + 32 + 12 + 28,
        "response/mean": (32 + 28) / 16,
        "response/truncated": 0.0,
        "groups/solved": 2 / 4,
        "groups/teaching": 2 / 4,
        "batch/portions": 2,
        "batch/micro_batches": 2,  # 44 tokens teach something, of the first
        "batch/imbalance": 0.0,
    }


# Two groups of three: episodes of 1, 2 and 3 rows, then of 2, 1 and 2.
PLACES = [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
WORTH = [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]


def index_of_several(oldest=(3,) * 11):
    sibling, segment = np.array(PLACES, np.int32).T
    return index(WORTH, [2] * 11, [*range(1, 12)], oldest)._replace(
        guid=np.array([0] * 6 + [1] * 5), sibling=sibling, segment=segment
    )


def batch_of_several(index, **settings):
    settings = {"actor__tokens_per_micro_batch": 100, **settings}
    return Batch(config(rollout__samples_per_prompt=3, **settings), Reader(index))


PARTS = [ShardRange("rollout-0", 1, 0, "u0", 0, 6), ShardRange("rollout-0", 1, 0, "u0", 6, 11)]
SEVERAL = PlanRecord(5, [0, 1], PARTS, 11, 0, 0)
THIRD, ROOT = 1 / 3, math.sqrt(3)


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        (False, [*[-THIRD] * 3, *[2 * THIRD] * 3, *[0] * 5]),  # the mean of rows would be 1/2
        (True, [*[-ROOT / 3] * 3, *[2 * ROOT / 3] * 3, *[0] * 5]),  # the deviation is sqrt(1/3)
    ],
)
def test_a_group_is_compared_by_episodes_and_their_rows_are_worth_the_same(normalize, expected):
    batch = batch_of_several(
        index_of_several(), algorithm__advantage__name="grpo" if normalize else "group_mean"
    )
    portion = batch.deal(SEVERAL)
    np.testing.assert_allclose(portion.columns["advantages"], expected, rtol=1e-5)
    assert share_of(portion, 0).rows == list(range(6))  # the second group teaches nothing


def test_of_a_batch_with_several_rows_an_episode_means_are_of_episodes():
    oldest = [3, 2, 1, 4, 4, 4, 4, 3, 4, 4, 4]
    batch = batch_of_several(index_of_several(oldest=oldest))
    batch.deal(SEVERAL)
    said = batch.describe(5)
    assert said["reward/mean"] == pytest.approx(4 / 6)  # of rows it would be 8/11
    assert said["response/mean"] == 66 / 6
    assert said["staleness/mean"] == (1 + 3 + 0 + 1 + 0 + 0) / 6 and said["staleness/max"] == 3
    assert (said["num_trajectories"], said["num_tokens"]) == (11, 66 + 22)
    assert (said["groups/solved"], said["groups/teaching"]) == (1 / 2, 1 / 2)


def test_rows_know_the_shard_that_they_are_in():
    assert shards_of(record(3).parts).tolist() == [0] * 8 + [1] * 4


@pytest.mark.parametrize("truncated", ["mask", "keep"])
def test_an_episode_counts_as_cut_off_whichever_of_its_sequences_was(truncated):
    """The second sibling of the first group has two rows; the second of these was cut off."""
    found = index_of_several()
    finish = found.finish.copy()
    finish[2] = FinishReason.LENGTH
    batch = batch_of_several(found._replace(finish=finish), algorithm__groups__truncated=truncated)
    trained = share_of(batch.deal(SEVERAL), 0).rows
    assert trained == ([0, 3, 4, 5] if truncated == "mask" else list(range(6)))


REFILL = {"algorithm__groups__name": "refill", "rollout__samples_per_prompt": 4}
DAPO = {"algorithm__preset": "dapo", "algorithm__groups__truncated": "penalty"}
CUT = FinishReason.LENGTH


def verdicts(found, **settings):
    return judge_of(config(**REFILL, **settings))(found)


def cut(found, *rows):
    finish = found.finish.copy()
    finish[list(rows)] = CUT
    return found._replace(finish=finish)


def test_groups_teach_whose_rewards_differ_and_the_others_are_solved_or_not():
    found = index([1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0])
    assert verdicts(found) == [
        GroupVerdict(True, False, 0.5),
        GroupVerdict(False, True, 1.0), GroupVerdict(False, False, 0.0)
    ]  # fmt: skip
    assert verdicts(found, reward__advanced__solved_at=0)[2].solved
    assert judge_of(config(algorithm__groups__name="as_sampled")) is None


def test_an_episode_without_a_reward_is_no_difference():
    found = index([1, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1], failed=[1, 4, 5, 6, 7, 8, 10])
    masked = verdicts(found, reward__on_error="mask")
    assert masked == [GroupVerdict(False, True, 1.0), GroupVerdict(False, False, None), masked[2]]
    assert masked[2] == GroupVerdict(False, True, 1.0)
    assert [verdict.teaches for verdict in verdicts(found)] == [True, False, True]


def test_the_rows_of_an_episode_count_once():
    """Groups of four rows here are two episodes of two."""
    found = index([1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0])
    found = found._replace(segment=np.array([0, 1] * 6, np.int32))
    settings = {**REFILL, "rollout__samples_per_prompt": 2}
    assert [v.teaches for v in judge_of(config(**settings))(found)] == [True, False, False]


def test_a_cut_response_is_compared_and_not_trained_on():
    """It was wrong: its siblings are better than the mean that it belongs to."""
    found = cut(index([0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0]), 0, 4, 5, 6, 7)
    mask = {"algorithm__groups__truncated": "mask"}
    portion = batch_of(found, **mask).deal(record())
    assert share_of(portion, 0).rows == [1, 2, 3, 8, 9, 10, 11]
    assert portion.columns["advantages"][:4].tolist() == [-0.75, 0.25, 0.25, 0.25]
    kept = batch_of(found, algorithm__groups__truncated="keep").deal(record())
    assert share_of(kept, 0).rows == [0, 1, 2, 3, 8, 9, 10, 11]
    said = verdicts(found, **mask)
    assert [(v.teaches, v.truncated) for v in said] == [(True, False), (False, True), (True, False)]
    alone = cut(index([1, 0, 1, 0] * 3), 0, 1, 2, 3, 4, 5, 6)
    assert [v.teaches for v in verdicts(alone, **mask)] == [False, True, True]


def test_the_penalty_grows_linearly_over_the_buffer():
    """L = 100, B = 20: 80 tokens cost nothing, 85 a quarter, 100 all."""
    penalty = {
        "algorithm__groups__truncated": "penalty", "algorithm__groups__overlong_buffer": 20,
        "rollout__max_new_tokens": 100,
    }  # fmt: skip
    found = index([1] * 12, responses=[80, 85, 90, 100, 10, 20, 80, 1, 100, 100, 100, 100])
    portion = batch_of(found, **penalty, actor__tokens_per_micro_batch=400).deal(record())
    centred = np.array([0, -0.25, -0.5, -1]) + 1.75 / 4
    np.testing.assert_allclose(portion.columns["advantages"][:4], centred, rtol=1e-6)
    assert [v.reward for v in verdicts(found, **penalty)] == [1, 1, 1]  # of the task alone
    assert AsSampled(truncated="penalty").buffer(20_480) == 4096  # DAPO's


def test_a_penalty_sets_nobody_apart_whose_rewards_agree_and_stays_in_groups_that_differ():
    """DAPO's eq. 11, L = 1000: all right, all wrong, and half, one 100 tokens too long."""
    long = {**DAPO, "rollout__max_new_tokens": 1000}
    lengths = [100, 100, 100, 801, 100, 100, 1000, 900, 100, 100, 100, 900]
    found = index([1, 1, 1, 1, -1, -1, -1, -1, 1, -1, -1, 1], responses=lengths)
    said = verdicts(found, **long)
    assert [(v.teaches, v.solved) for v in said] == [(False, True), (False, False), (True, False)]
    batch = batch_of(found, **long, actor__tokens_per_micro_batch=9000)
    portion = batch.deal(record())
    # 1, -1, -1 and 1 - (900 - 800) / 200 = 0.5: their mean is -1/8
    deviation = math.sqrt((1.125**2 + 2 * 0.875**2 + 0.625**2) / 3)
    expected = np.array([1.125, -0.875, -0.875, 0.625]) / deviation
    np.testing.assert_allclose(portion.columns["advantages"][8:], expected, rtol=1e-5)
    assert batch.describe(5)["groups/teaching"] == 1 / 3


def test_a_long_response_in_a_dialogue_or_a_buffer_too_long_or_unused_is_refused():
    with pytest.raises(ConfigError, match=r"truncated = 'penalty': an episode of rollout\.env"):
        config(algorithm__groups__truncated="penalty", rollout__environment="two.py:Turns")
    with pytest.raises(ConfigError, match=r"overlong_buffer = 300: is longer than rollout\.max"):
        config(algorithm__groups__truncated="penalty", algorithm__groups__overlong_buffer=300)
    with pytest.raises(ConfigError, match=r"overlong_buffer is of truncated = 'penalty'"):
        config(algorithm__groups__overlong_buffer=30)


class Sequencer:
    def __init__(self, error=None):
        self.error, self.looked = error, threading.Semaphore(0)

    def look(self):
        self.looked.release()
        if self.error:
            raise self.error


def test_a_lookout_looks_until_it_is_closed_or_fails_and_raises_where_it_is_asked():
    sequencer = Sequencer()
    lookout = Lookout(sequencer, every_s=0)
    for _ in range(3):
        assert sequencer.looked.acquire(timeout=20)
    lookout.check()
    lookout.close()
    assert not lookout._thread.is_alive()
    sequencer = Sequencer(BusError("damaged"))
    lookout = Lookout(sequencer, every_s=0)
    assert sequencer.looked.acquire(timeout=20)
    lookout._thread.join(timeout=20)
    with pytest.raises(BusError, match="damaged"):
        lookout.check()
    lookout.close()
