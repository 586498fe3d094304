"""Settings of rewards, and rewards that are the sum of several."""

import re
from pathlib import Path

import hostile
import pytest
from reward_runs import in_processes, scores_here
from roles.role_fakes import config

from relax_hpc.config.rollout import RewardConfig
from relax_hpc.environments.rewards.contract import (
    Reward,
    Sample,
    Score,
    Weighted,
    as_score,
    check_settings,
    combine,
)
from relax_hpc.environments.rewards.scorer import Scorer
from relax_hpc.errors import ConfigError
from relax_hpc.roles.rollout.check import check_lowest_rewards

PLUGIN = Path(hostile.__file__)


def test_no_reward_that_can_be_below_0_goes_with_an_advantage_that_takes_none():
    dapo = {"name": "dapo"}
    half = {"terms": {"a": {"name": "length", "weight": 0.5, "args": {"limit": 9, "cache": 1}}}}
    max_rl = {"algorithm__preset": "max_rl"}
    of_dapo, of_half = "reward.name = 'dapo': can be -1, ", "a.name = 'length': can be -0.5, "
    for reward, words in ((dapo, of_dapo), (half, of_half)):
        with pytest.raises(ConfigError, match=re.escape(words)):
            check_lowest_rewards(config(reward=reward, **max_rl))
        check_lowest_rewards(config(reward=reward))
    check_lowest_rewards(config(reward=dapo | {"args": {"wrong": 0.0}}, **max_rl))


def scores_of(terms, *responses, deadline_s=5.0):
    return scores_here(Reward(terms), *map(Sample, responses), deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"tolerence": 1}, "reward.args.tolerence = 1: no such setting; there are tolerance, "),
        ({"tolerance": "1"}, "reward.args.tolerance = '1': use a number, without quotes"),
        ({"scheme": "odd"}, "reward.args.scheme = 'odd': use 'plain' or 'signed'"),
    ],
)  # fmt: skip
def test_a_setting_that_there_is_not_or_of_a_wrong_type_is_refused(args, words):
    with pytest.raises(ConfigError) as refused:
        check_settings("reward.args", hostile.typed, args)
    assert str(refused.value).startswith(words)


def test_settings_that_fit_are_taken_and_those_nobody_can_check_are_left_to_the_function():
    fits = {"tolerance": 1, "strict": True, "labels": ["b"], "scheme": "signed"}
    check_settings("reward.args", hostile.typed, fits)
    check_settings("reward.args", hostile.with_settings, {"odd": "whatever"})
    with pytest.raises(ConfigError, match="this reward has none; remove it"):
        check_settings("reward.args", hostile.ranks, {"a": 1})


def test_a_reward_is_called_with_the_settings_of_the_job():
    args = {"tolerance": 0.25}
    settings = RewardConfig(name=f"{PLUGIN}:typed", args=args, advanced={"workers": 1})
    assert in_processes(settings, [Sample("a")]) == [[Score(0.25)]]


def test_terms_are_weighted_and_added_and_their_parts_add_up():
    """2 * (0.5 + 3) - 0.5 * 4 = 5."""
    terms = [
        Weighted(hostile.with_settings, title="sized", weight=2.0),
        Weighted(hostile.by_order, title="length", weight=-0.5),
    ]
    [score] = scores_of(terms, "four")
    assert score == Score(
        5.0, {"sized": 7.0, "sized/tolerance": 1.0, "sized/count": 6.0, "length": -2.0}
    )


def test_an_error_of_a_term_is_the_samples_and_no_siblings():
    terms = [Weighted(hostile.by_order, title="order"), Weighted(hostile.ranks, title="rank")]
    one, other = scores_of(terms, "abc", "ab")
    assert (one, other) == (
        Score(4.0, {"order": 3.0, "rank": 1.0}), Score(2.0, {"order": 2.0, "rank": 0.0})
    )  # fmt: skip
    terms = [terms[0], Weighted(hostile.parts, title="parts")]
    good, bad = scores_of(terms, "abc", "raise")
    assert bad.value == 0 and bad.parts == {}
    assert bad.error.startswith("order: ZeroDivisionError: division by zero (hostile.py:")
    assert good.value == 6.0


def test_an_awaited_term_that_takes_too_long_costs_its_sample():
    terms = [Weighted(hostile.awaited, title="a"), Weighted(hostile.parts, title="b")]
    late, good = scores_of(terms, "hang", "ab", deadline_s=0.2)
    assert late == Score(0.0, error="a: took longer than 0.2 s")
    assert good.value == 5.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Score(3.0, {"a": 1.0, "b": 1.0}), "the reward is 3, and its parts add up to 2"),
        (Score(1e39), "the reward is 1e+39"),
        (Score(1.0, {"": 1.0}), "a part is called ''"),
        (Score(1.0, {f"p{n}": 1 / 65 for n in range(65)}), "65 parts, more than 64"),
    ],
)
def test_parts_that_do_not_add_up_or_cannot_be_kept_are_an_error(given, words):
    with pytest.raises(ValueError) as refused:
        as_score(given)
    assert words in str(refused.value)


def test_parts_add_up_as_far_as_rounding_goes_and_parts_of_parts_are_not_added():
    for score in (
        Score(0.3, {"a": 0.1, "b": 0.2, "b/c": 5.0}),
        Score(1e6, {"a": 1e6 + 0.5}),
        Score(0.0, {"a": 1e9, "b": -1e9 + 10}),
    ):
        assert as_score(score) == score


def test_a_sum_that_float32_cannot_hold_is_an_error_of_the_sample():
    [score] = scores_of([Weighted(hostile.parts, title="a", weight=3e38)], "x")
    assert score.value == 0 and "reward is 9." in score.error
    assert combine({"a": (1.0, Score(0.0, error="why"))}).error == "a: why"


def failed_values(answers, responses, **reward):
    samples = [Sample(*each) for each in zip(responses, [""] * 3, answers, strict=True)]
    [scores] = in_processes(
        RewardConfig(advanced={"workers": 1}, deadline_s=1.0, **reward), samples
    )
    return [(score.value, score.error is not None) for score in scores]


@pytest.mark.parametrize(
    ("args", "wrong"), [({}, -1.0), ({"wrong": -0.5}, -0.5), ({"wrong": 0.5}, 0.0)]
)
def test_an_answer_that_breaks_the_grader_does_not_beat_a_wrong_one(args, wrong):
    """The third answer is no text, which dapo cannot compare."""
    found = failed_values(["5", "5", None], ["Answer: 5", "", "Answer: 5"], name="dapo", args=args)
    assert found == [(1.0, False), (args.get("wrong", -1.0), False), (wrong, True)]


@pytest.mark.parametrize("response", ["raise", "exit", "hang"])
def test_a_sample_that_failed_is_worth_the_least_of_all_built_in_terms(response):
    """2 * -0.5 of dapo, 3 * -1 of length; 0 of one's own, and of a penalty for no loops."""
    terms = {
        "right": {"name": "dapo", "weight": 2.0, "args": {"wrong": -0.5}},
        "short": {"name": "length", "weight": 3.0},
        "looped": {"name": "repetition", "weight": -1.0},
        "own": {"name": f"{PLUGIN}:by_order", "weight": 0.25},
    }
    found = failed_values(["5"] * 3, ["Answer: 5", "four", response], terms=terms)
    assert found == [(2 + 9 / 4, False), (-1 + 4 / 4, False), (-4.0, True)]


async def test_settings_are_not_on_the_command_line_of_a_process():
    settings = RewardConfig(
        name=f"{PLUGIN}:typed", args={"labels": ["secret"]}, advanced={"workers": 1}
    )

    async with Scorer(settings) as scorer:
        [line, *_] = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in scorer.pids]
    assert b"relax_hpc.environments.rewards.worker" in line and b"secret" not in line
