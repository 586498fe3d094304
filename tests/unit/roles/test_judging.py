"""Which prompt groups teach, what a cut response is worth, and who looks while others train."""

import math
import threading

import numpy as np
import pytest
from role_fakes import config
from test_portions import batch_of, index, record

from relax_hpc.algorithms.groups import AsSampled
from relax_hpc.bus.plan import SkippedGroup
from relax_hpc.bus.skips import GroupVerdict
from relax_hpc.errors import BusError, ConfigError
from relax_hpc.roles.actor.rank0 import Lookout
from relax_hpc.roles.dealing.portions import (
    judge_of,
    share_of,
    with_skipped,
)
from relax_hpc.schema import FinishReason

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


def test_a_penalty_that_makes_up_for_the_difference_leaves_nothing_to_learn():
    """Right and as long as can be is worth 1 - 1, as much as wrong and short."""
    long = {**DAPO, "rollout__max_new_tokens": 100}
    found = index([1, 0, 0, 0], [2] * 4, [100, 10, 10, 10])
    assert verdicts(found, **long) == [GroupVerdict(False, False, 0.25)]


def test_a_long_response_in_a_dialogue_or_a_buffer_too_long_or_unused_is_refused():
    with pytest.raises(ConfigError, match=r"truncated = 'penalty': an episode of rollout\.env"):
        config(algorithm__groups__truncated="penalty", rollout__environment="two.py:Turns")
    with pytest.raises(ConfigError, match=r"overlong_buffer = 300: is longer than rollout\.max"):
        config(algorithm__groups__truncated="penalty", algorithm__groups__overlong_buffer=300)
    with pytest.raises(ConfigError, match=r"overlong_buffer is of truncated = 'penalty'"):
        config(algorithm__groups__overlong_buffer=30)
    with pytest.raises(ConfigError, match=r"did you mean refill"):
        config(algorithm__groups__name="refil")


def test_what_is_said_of_a_batch_has_those_that_were_skipped():
    skipped = [
        SkippedGroup(3, "u", 4, 1, 30, solved=True, reward=1.0),
        SkippedGroup(4, "u", 4, 1, 40, solved=False, reward=0.0),
        SkippedGroup(5, "u", 4, 1, 50, solved=False, reward=None),
    ]
    said = with_skipped({"reward/mean": 0.5}, skipped, config(schedule__prompts_per_step=4))
    assert said == {
        "reward/sampled": 3 / 6, "groups/skipped": 3, "groups/skipped_solved": 1,
        "groups/skipped_retired": 0,
    }  # fmt: skip
    # All rewards of the batch itself have failed: there is no mean of it.
    assert with_skipped({}, skipped, config())["reward/sampled"] == 1 / 2
    assert "reward/sampled" not in with_skipped({}, skipped[2:], config())


class Sequencer:
    def __init__(self, error=None):
        self.error, self.looked = error, threading.Semaphore(0)

    def look(self):
        self.looked.release()
        if self.error:
            raise self.error


def test_a_lookout_looks_until_it_is_closed():
    sequencer = Sequencer()
    lookout = Lookout(sequencer, every_s=0)
    for _ in range(3):
        assert sequencer.looked.acquire(timeout=20)
    lookout.check()
    lookout.close()
    assert not lookout._thread.is_alive()


def test_what_looking_has_raised_is_raised_where_it_is_asked_for():
    sequencer = Sequencer(BusError("damaged"))
    lookout = Lookout(sequencer, every_s=0)
    assert sequencer.looked.acquire(timeout=20)
    lookout._thread.join(timeout=20)
    with pytest.raises(BusError, match="damaged"):
        lookout.check()
    lookout.close()
