"""Rewards in worker processes: what they may do, and whom it costs."""

import asyncio
import json
import os
import signal
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import hostile
import psutil
import pytest
from reward_runs import in_processes, refusal, scores_here
from roles.role_fakes import Events

from relax_hpc.config.rollout import RewardConfig
from relax_hpc.environments.rewards import scorer as scorer_module
from relax_hpc.environments.rewards import trial
from relax_hpc.environments.rewards.contract import Kind, Reward, Sample, Score, Weighted, fail
from relax_hpc.environments.rewards.scorer import LEAST, WINDOW, ErrorLimit, Scorer
from relax_hpc.errors import ConfigError, RewardError

PLUGIN = Path(hostile.__file__)
DEADLINE_S = 1.0


def reward(function, workers=2, deadline_s=DEADLINE_S):
    advanced = {"memory_gib": 0.5, "workers": workers}
    return RewardConfig(name=f"{PLUGIN}:{function}", deadline_s=deadline_s, advanced=advanced)


def family():
    """Processes below this one, whatever became of those between."""
    return {each.pid for each in psutil.Process().children(recursive=True)}


def scores_of(config, *groups, answer=""):
    """Scores of groups of responses, all asked for at once."""
    before = family()
    groups = [[Sample(response, answer=answer) for response in group] for group in groups]
    scores = in_processes(config, *groups)
    assert family() <= before, "no process is left"
    return scores


def values(scores):
    return [score.value for score in scores]


def test_a_reward_may_be_called_with_a_sample_its_fields_or_the_group():
    assert values(scores_of(reward("ranks"), ["a", "abc", "ab"])[0]) == [0, 1, 0]
    [[score]] = scores_of(reward("parts"), ["a"])
    assert score == Score(3.0, {"right": 1.0, "short": 2.0})
    [[score]] = scores_of(reward("awaited"), ["abc"])
    assert score == Score(3.0)
    sample = Sample("ab", answer="a", metadata={"suffix": "b"})
    assert in_processes(reward("with_fields", workers=1), [sample]) == [[Score(1.0)]]


def test_built_in_rewards_score_in_a_process_of_their_own_without_torch():
    config = RewardConfig(name="boxed_number", advanced={"workers": 1})
    assert values(scores_of(config, [r"\boxed{7}", "7"], answer="7")[0]) == [1, 0]
    [[score]] = scores_of(reward("has_torch"), ["a"])
    assert score == Score(0.0)


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("hang", "took longer than 1 s"), ("fork", "took longer than 1 s"),
        ("orphan", "ended with 0"), ("segfault", "SIGSEGV"),
        ("raise", "ZeroDivisionError: division by zero"), ("memory", "MemoryError"),
        ("socket", "nonsense"),
    ],
)  # fmt: skip
def test_a_bad_sample_costs_itself_and_no_sibling(response, error):
    [scores] = scores_of(reward("by_order", workers=1), ["four", response, "seventy"])
    assert (scores[0], scores[2]) == (Score(4.0), Score(7.0))
    assert scores[1].value == 0 and error in (scores[1].error or "")


@pytest.mark.parametrize("response", sorted(hostile.HARMLESS))
def test_what_a_reward_prints_or_forks_does_not_reach_its_owner(response):
    [scores, after] = scores_of(reward("by_order", workers=1), [response], ["ab"])
    assert scores[0].error is None and after == [Score(2.0)]


def test_a_group_reward_that_dies_costs_the_group():
    [lost, kept] = scores_of(reward("ranks"), ["a", "exit"], ["a", "bc"])
    assert values(lost) == [0, 0] and all("ended with 3" in score.error for score in lost)
    assert kept == [Score(0.0), Score(1.0)]


@pytest.mark.parametrize("response", ["hang", "exit"])
def test_an_awaited_reward_costs_itself_whoever_shares_its_process(response):
    groups = [["ab", "abc"] for _ in range(6)]
    groups[3] = ["ab", response]
    found = scores_of(reward("awaited", workers=1), *groups)
    assert found[3][1].error and found[3][0] == Score(2.0)
    assert [each for n, each in enumerate(found) if n != 3] == 5 * [[Score(2.0), Score(3.0)]]


async def test_groups_whose_process_somebody_killed_are_scored_together_in_another(monkeypatch):
    """One after the other, as where one of them may be why, 64 groups of a judge take an hour."""
    alone = []
    monkeypatch.setattr(Scorer, "_alone", lambda _, group: alone.append(group))

    async with Scorer(reward("slowly_awaited", workers=1)) as scorer:
        [pid] = scorer.pids
        groups = [[Sample("a" * n), Sample("b")] for n in range(1, 20)]
        scoring = [asyncio.create_task(scorer.score(group)) for group in groups]
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        found = await asyncio.gather(*scoring)
        assert not scorer._anew
    assert [values(found) for found in found] == [[n, 1.0] for n in range(1, 20)]
    assert not alone


async def test_the_loop_goes_on_while_a_reward_hangs():
    async with Scorer(reward("by_order", workers=1)) as scorer:
        hanging = asyncio.create_task(scorer.score([Sample("hang")]))
        count = 0
        while not hanging.done():
            await asyncio.sleep(0.01)
            count += 1
    assert count > 3


async def test_whoever_waits_is_told_that_a_lost_worker_cannot_be_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(scorer_module, "START_AGAIN_S", 0.01)
    file = tmp_path / "mine.py"
    file.write_text("import os\ndef score(response):\n    os.kill(os.getpid(), 9)\n")

    config = RewardConfig(name=f"{file}:score", advanced={"workers": 1})
    async with Scorer(config) as scorer, asyncio.timeout(60):
        await scorer._spare
        file.write_text("def score(:")
        for _ in range(2):  # the second takes the spare along
            [score] = await scorer.score([Sample("a")])
            assert score.error == "the process was killed by SIGKILL"
        waiting = [scorer.score([Sample("a")]) for _ in range(2)]
        done = await asyncio.gather(*waiting, return_exceptions=True)
    for error in done:
        assert isinstance(error, ConfigError) and "SyntaxError" in str(error)


async def test_a_cancelled_group_leaves_its_worker_to_the_others():
    async with Scorer(reward("by_order", workers=1)) as scorer:
        pids = scorer.pids
        task = asyncio.create_task(scorer.score([Sample("abc")] * 100))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await scorer.score([Sample("abc")]) == [Score(3.0)]
        assert set(pids) <= set(scorer.pids)


async def test_nobody_is_left_when_it_is_closed_while_busy():
    before = family()
    async with Scorer(reward("by_order", deadline_s=1000)) as scorer:
        busy = [
            asyncio.create_task(scorer.score([Sample(response)]))
            for response in ("hang", "fork", "blocked")
        ]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in busy)
    assert family() <= before


async def test_a_process_that_keeps_memory_is_replaced():
    async with Scorer(RewardConfig(name="random", advanced={"workers": 1})) as scorer:
        [first] = [w for w in scorer._workers if w.pid in scorer.pids][:1]
        await scorer.score([Sample("a")])
        first.kept_bytes = 2 << 30
        for _ in range(3):
            await scorer.score([Sample("a")])
        async with asyncio.timeout(60):
            while first.pid in scorer.pids:
                await asyncio.sleep(0.05)
        assert scorer.pids


def test_metadata_that_json_does_not_know_reaches_a_reward_as_text():
    metadata = {
        "at": datetime(2024, 1, 31, 12, 30, tzinfo=UTC),
        "price": Decimal("1.50"),
        "inside": [{"took": timedelta(hours=2)}, b"ab", None],
    }
    [[found]] = in_processes(reward("metadata", workers=1), [Sample("a", metadata=metadata)])
    assert json.loads(found.error) == {
        "at": "2024-01-31T12:30:00+00:00",
        "price": "1.50",
        "inside": [{"took": "2:00:00"}, "YWI=", None],
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{PLUGIN}:odd", "takes `reference_text`"),
        ("absent.py:score", "No such file"),
        ("boxed_nmber", "did you mean 'boxed_number'?"),
    ],
)
def test_a_reward_that_does_not_work_is_refused_by_name(name, words):
    said = refusal(RewardConfig(name=name), Sample("1", answer="1"))
    assert words in said and f"reward.name = {name!r}" in said


def test_a_slow_import_has_the_time_that_its_run_gives_it(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(2)\ndef score(response): return 1.0\n")

    async def start(start_s):
        config = RewardConfig(name=f"{path}:score", advanced={"workers": 1})
        async with Scorer(config, start_s=start_s):
            pass

    with pytest.raises(ConfigError, match="the import takes longer than 1 s"):
        asyncio.run(start(1))
    asyncio.run(start(1000))


def test_a_reward_that_hangs_or_dies_on_a_response_is_refused():
    for response, words in (("hang", "took longer than 1 s"), ("exit", "the process ended with 3")):
        said = f"scoring the response '{response}' to a prompt of yours, {words}; correct it"
        assert said in refusal(reward("by_order"), Sample(response))
    trial.check(reward("by_order"), Sample("abc"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("return float(int(response) == 1)", r"ValueError: invalid literal .* \(mine.py:2\); more"),
     ("if response == answer: return 1.0", "TypeError: gave no number, .* but None; more than")],
)  # fmt: skip
def test_a_reward_that_fails_at_a_wrong_response_is_refused_unless_each_may(tmp_path, wrong, said):
    path = tmp_path / "mine.py"
    path.write_text(f"def score(response, answer):\n    {wrong}\n")
    mine = RewardConfig(name=f"{path}:score")
    with pytest.raises(ConfigError, match=f"the response 'I do not know.' .*{said}.*say 0.0"):
        trial.check(mine, Sample("1", answer="1"))
    mine = RewardConfig(name=f"{path}:score", advanced={"most_errors": 1.0})
    trial.check(mine, Sample("1", answer="1"))


@pytest.mark.parametrize(
    ("function", "pools", "message"),
    [
        ("asks_a_judge", [], "it asks engines of a pool 'judge'"),
        ("asks_somebody", [], "it asks engines, and the job has no other than rollout"),
        ("asks_without_waiting", ["judge"], "takes `engines`, which are waited for"),
    ],
)
def test_a_reward_that_asks_engines_is_refused_where_the_job_has_none(function, pools, message):
    assert message in refusal(reward(function), Sample("yes"), pools)


@pytest.mark.parametrize("function", ["asks_a_judge", "asks_somebody"])
def test_a_reward_that_asks_engines_is_not_called_before_there_are_any(function):
    trial.check(reward(function), Sample("yes"), ["judge"])


def test_a_reward_is_given_the_engines_of_its_run():
    class Judge(dict):
        async def generate(self, text):
            return {"fine": "yes"}.get(text, "no")

    asked = Reward([Weighted(hostile.asks_a_judge, lambda: {"judge": Judge()})])
    assert asked.kind == Kind(False, True, ("judge",))
    assert values(scores_here(asked, Sample("fine"), Sample("bad"))) == [1, 0]


def errors_of(*responses):
    """The events of errors where these are scored one after the other, (what, heldout) each."""
    events = Events()

    async def score():
        async with Scorer(reward("by_order", workers=1), events) as scorer:
            for response, heldout in responses:
                await scorer.score([Sample(response)], heldout=heldout)

    asyncio.run(score())
    return events.of("reward_errors")


def test_errors_of_held_out_prompts_are_counted_by_themselves(caplog):
    found = errors_of(("raise", True), ("raise", False), ("ab", True))
    counts = [(each["heldout"], each["num_errors"], each["num_samples"]) for each in found]
    assert sorted(counts) == [(False, 1, 1), (True, 0, 1), (True, 1, 1)]
    assert "1 of 1 held-out rewards failed; the first: ZeroDivisionError" in caplog.text
    assert "1 of 1 rewards failed; the first: ZeroDivisionError" in caplog.text


GOOD, BAD = Score(1.0), fail("ValueError: a bug")


def feed(limit, scores, first=0):
    """Gives them one at a time; the number of those that were taken."""
    for number, score in enumerate(scores):
        try:
            limit.add({f"{first + number}/0": score})
        except RewardError as error:
            return number, str(error)
    return len(scores), ""


def test_a_run_ends_when_more_than_the_allowed_part_of_the_window_failed():
    """0.05 of 500 are 25: the 26th ends it, and it is the 260th sample here."""
    taken, said = feed(ErrorLimit(0.05), ([GOOD] * 9 + [BAD]) * 40)
    assert taken == 259
    assert "reward.advanced.most_errors = 0.05: " in said
    assert "26 of the last 260 samples" in said and "26 x ValueError: a bug, first in 9/0" in said


def test_nothing_ends_before_there_are_enough_samples_to_judge_by():
    assert feed(ErrorLimit(0.05), [BAD] * 300)[0] == LEAST - 1


def test_errors_leave_the_window_again():
    """25 in every 500 for ever are allowed; with 26 it ends within the second window."""
    assert feed(ErrorLimit(0.05), ([BAD] * 25 + [GOOD] * 475) * 10)[0] == 10 * WINDOW
    taken, _ = feed(ErrorLimit(0.05), [BAD] * 25 + [GOOD] * 475 + [BAD] * 25 + [GOOD] * 10 + [BAD])
    assert taken == WINDOW + 25 + 10


@pytest.mark.parametrize(("most", "ends"), [(0.0, True), (1.0, False)])
def test_none_or_all_may_fail(most, ends):
    taken, _ = feed(ErrorLimit(most), [GOOD] * 400 + [BAD] * 600)
    assert taken == (400 if ends else 1000)
