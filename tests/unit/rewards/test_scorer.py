"""Rewards in worker processes: what they may do, and whom it costs."""

import asyncio
import json
import os
import signal
import time
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock
from decimal import Decimal
from pathlib import Path

import hostile
import psutil
import pytest

from relax_hpc.config.reward import RewardConfig
from relax_hpc.errors import ConfigError
from relax_hpc.rewards import process, trial
from relax_hpc.rewards import scorer as scorer_module
from relax_hpc.rewards.contract import Kind, Sample, Score, kind_of
from relax_hpc.rewards.reward import Reward, Weighted
from relax_hpc.rewards.scorer import Scorer

PLUGIN = Path(hostile.__file__)
DEADLINE_S = 1.0


def reward(function, **settings):
    settings = {"deadline_s": DEADLINE_S, "memory_gib": 0.5, "workers": 2} | settings
    return RewardConfig(name=f"{PLUGIN}:{function}", **settings)


def family():
    """Processes below this one, whatever became of those between."""
    return {each.pid for each in psutil.Process().children(recursive=True)}


def scores_of(config, *groups, answer=""):
    """Scores of groups of responses, all asked for at once."""

    async def score():
        async with Scorer(config) as scorer:
            samples = [[Sample(response, answer=answer) for response in group] for group in groups]
            return await asyncio.gather(*map(scorer.score, samples))

    before = family()
    scores = asyncio.run(score())
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


def test_built_in_rewards_score_in_a_process_of_their_own_without_torch():
    config = RewardConfig(name="boxed_number", workers=1)
    assert values(scores_of(config, [r"\boxed{7}", "7"], answer="7")[0]) == [1, 0]
    [[score]] = scores_of(reward("has_torch"), ["a"])
    assert score == Score(0.0)


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("hang", "took longer than 1 s"),
        ("power", "took longer than 1 s"),
        ("blocked", "took longer than 1 s"),
        ("fork", "took longer than 1 s"),
        ("exit", "ended with 3"),
        ("sys.exit", "ended with"),
        ("orphan", "ended with 0"),
        ("segfault", "SIGSEGV"),
        ("raise", "ZeroDivisionError: division by zero"),
        ("memory", "MemoryError"),
        ("socket", "nonsense"),
    ],
)
def test_a_bad_sample_costs_itself_and_no_sibling(response, error):
    begun = time.monotonic()
    [scores] = scores_of(reward("by_order", workers=1), ["four", response, "seventy"])
    assert (scores[0], scores[2]) == (Score(4.0), Score(7.0))
    assert scores[1].value == 0 and error in (scores[1].error or "")
    assert time.monotonic() - begun < DEADLINE_S + 10


@pytest.mark.parametrize("response", sorted(hostile.HARMLESS))
def test_what_a_reward_prints_or_forks_does_not_reach_its_owner(response):
    [scores, after] = scores_of(reward("by_order", workers=1), [response], ["ab"])
    assert scores[0].error is None and after == [Score(2.0)]


def test_a_group_reward_that_dies_costs_the_group():
    [lost, kept] = scores_of(reward("ranks"), ["a", "exit"], ["a", "bc"])
    assert values(lost) == [0, 0] and all("ended with 3" in score.error for score in lost)
    assert kept == [Score(0.0), Score(1.0)]


@pytest.mark.parametrize("response", ["hang", "exit", "blocked"])
def test_an_awaited_reward_costs_itself_whoever_shares_its_process(response):
    groups = [["ab", "abc"] for _ in range(6)]
    groups[3] = ["ab", response]
    found = scores_of(reward("awaited", workers=1), *groups)
    assert found[3][1].error and found[3][0] == Score(2.0)
    assert [each for n, each in enumerate(found) if n != 3] == 5 * [[Score(2.0), Score(3.0)]]


def test_groups_whose_process_somebody_killed_are_scored_together_in_another(monkeypatch):
    """One after the other, as where one of them may be why, 64 groups of a judge take an hour."""
    alone = []
    monkeypatch.setattr(Scorer, "_alone", lambda _, group: alone.append(group))

    async def score():
        async with Scorer(reward("slowly_awaited", workers=1)) as scorer:
            [pid] = scorer.pids
            groups = [[Sample("a" * n), Sample("b")] for n in range(1, 20)]
            scoring = [asyncio.create_task(scorer.score(group)) for group in groups]
            await asyncio.sleep(0.3)
            os.kill(pid, signal.SIGKILL)
            found = await asyncio.gather(*scoring)
            assert not scorer._anew
            return found

    assert [values(found) for found in asyncio.run(score())] == [[n, 1.0] for n in range(1, 20)]
    assert not alone


@pytest.mark.parametrize(
    ("function", "error"),
    [("text", "no number"), ("nan", "is nan"), ("too_few", "1 scores for 2")],
)
def test_what_is_no_score_is_an_error(function, error):
    [scores] = scores_of(reward(function, workers=1), ["a", "b"])
    assert all(score.value == 0 and error in score.error for score in scores)


def test_a_response_of_ten_megabytes_is_scored():
    [[score]] = scores_of(reward("by_order", workers=1, deadline_s=10), ["é" * 10_000_000])
    assert score == Score(1e7)


def test_the_loop_goes_on_while_a_reward_hangs():
    async def ticks():
        async with Scorer(reward("by_order", workers=1)) as scorer:
            hanging = asyncio.create_task(scorer.score([Sample("hang")]))
            count = 0
            while not hanging.done():
                await asyncio.sleep(0.01)
                count += 1
            return count

    assert asyncio.run(ticks()) > 30


def test_whoever_waits_is_told_that_a_lost_worker_cannot_be_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(scorer_module, "START_AGAIN_S", 0.01)
    file = tmp_path / "mine.py"
    file.write_text("import os\ndef score(response):\n    os.kill(os.getpid(), 9)\n")

    async def run():
        config = RewardConfig(name=f"{file}:score", workers=1)
        async with Scorer(config) as scorer, asyncio.timeout(60):
            await scorer._spare
            file.write_text("def score(:")
            for _ in range(2):  # the second takes the spare along
                [score] = await scorer.score([Sample("a")])
                assert score.error == "the process was killed by SIGKILL"
            waiting = [scorer.score([Sample("a")]) for _ in range(2)]
            return await asyncio.gather(*waiting, return_exceptions=True)

    for error in asyncio.run(run()):
        assert isinstance(error, ConfigError) and "SyntaxError" in str(error)


def test_a_cancelled_group_leaves_its_worker_to_the_others():
    async def cancel():
        async with Scorer(reward("by_order", workers=1)) as scorer:
            pids = scorer.pids
            task = asyncio.create_task(scorer.score([Sample("abc")] * 100))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await scorer.score([Sample("abc")]) == [Score(3.0)]
            assert set(pids) <= set(scorer.pids)

    asyncio.run(cancel())


def test_nobody_is_left_when_it_is_closed_while_busy():
    async def close():
        async with Scorer(reward("by_order", deadline_s=1000)) as scorer:
            busy = [
                asyncio.create_task(scorer.score([Sample(response)]))
                for response in ("hang", "fork", "blocked")
            ]
            await asyncio.sleep(0.3)
            assert not any(task.done() for task in busy)

    before, begun = family(), time.monotonic()
    asyncio.run(close())
    assert family() <= before
    assert time.monotonic() - begun < 20


def test_a_process_that_keeps_memory_is_replaced():
    async def replaced():
        async with Scorer(RewardConfig(name="random", workers=1)) as scorer:
            [first] = [w for w in scorer._workers if w.pid in scorer.pids][:1]
            await scorer.score([Sample("a")])
            first.kept_bytes = 2 << 30
            for _ in range(3):
                await scorer.score([Sample("a")])
            await asyncio.sleep(1)
            return first.pid, scorer.pids

    pid, left = asyncio.run(replaced())
    assert pid not in left and left


def test_fields_of_a_sample_are_given_by_name():
    sample = Sample("ab", answer="a", metadata={"suffix": "b"})

    async def score():
        async with Scorer(reward("with_fields", workers=1)) as scorer:
            return await scorer.score([sample])

    assert asyncio.run(score()) == [Score(1.0)]


def test_metadata_that_json_does_not_know_reaches_a_reward_as_text():
    metadata = {
        "day": date(2024, 1, 31),
        "at": datetime(2024, 1, 31, 12, 30, tzinfo=UTC),
        "time": clock(12, 30),
        "price": Decimal("1.50"),
        "picture": b"ab",
        "inside": [{"took": timedelta(hours=2)}],
        "known": [1, None, "a"],
    }

    async def score():
        async with Scorer(reward("metadata", workers=1)) as scorer:
            return await scorer.score([Sample("a", metadata=metadata)])

    [found] = asyncio.run(score())
    assert json.loads(found.error) == {
        "day": "2024-01-31",
        "at": "2024-01-31T12:30:00+00:00",
        "time": "12:30:00",
        "price": "1.50",
        "picture": "YWI=",
        "inside": [{"took": "2:00:00"}],
        "known": [1, None, "a"],
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{PLUGIN}:odd", "takes `reference_text`"),
        (f"{PLUGIN}:absent", "has no attribute 'absent'"),
        (f"{PLUGIN}:by_ordre", "hostile.py has no attribute 'by_ordre'; did you mean 'by_order'?"),
        ("no_such.module:score", "No module named 'no_such'"),
        ("absent.py:score", "No such file"),
        ("boxed_nmber", "did you mean 'boxed_number'?"),
        ("coin", "is 'random' now; use that"),
        (f"{PLUGIN}:text", "no number"),
    ],
)
def test_a_reward_that_does_not_work_is_refused_by_name(name, words):
    with pytest.raises(ConfigError) as refused:
        trial.check(RewardConfig(name=name), Sample("1", answer="1"))
    assert words in str(refused.value) and f"reward.name = {name!r}" in str(refused.value)


def test_a_slow_import_has_the_time_that_its_run_gives_it(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(2)\ndef score(response): return 1.0\n")

    async def start(start_s):
        config = RewardConfig(name=f"{path}:score", workers=1)
        async with Scorer(config, start_s=start_s):
            pass

    with pytest.raises(ConfigError, match="the import takes longer than 1 s"):
        asyncio.run(start(1))
    asyncio.run(start(1000))


@pytest.mark.parametrize("line", ["1 / 0", "raise OSError('no words here')", "def score(:"])
def test_a_file_that_raises_while_it_is_imported_is_refused_with_what_it_raised(tmp_path, line):
    path = tmp_path / "mine.py"
    path.write_text(f"{line}\ndef score(response, answer): return 1.0\n")
    said = {"1": "division by zero", "r": "no words here", "d": "SyntaxError"}[line[0]]
    with pytest.raises(ConfigError) as refused:
        trial.check(RewardConfig(name=f"{path}:score"), Sample("1", answer="1"))
    assert said in str(refused.value) and f"reward.name = '{path}:score'" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_reward_that_hangs_or_dies_on_a_response_is_refused():
    for response, words in (("hang", "took longer than 1 s"), ("exit", "the process ended with 3")):
        said = f"scoring the response '{response}' to a prompt of yours, {words}; correct it"
        with pytest.raises(ConfigError, match=said):
            trial.check(reward("by_order"), Sample(response))
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
    trial.check(mine.model_copy(update={"most_errors": 1.0}), Sample("1", answer="1"))


def test_a_reward_whose_import_takes_long_is_told_of(monkeypatch, caplog):
    monkeypatch.setattr(process, "TELL_S", 0.0)
    trial.check(reward("by_order"), Sample("abc"))
    assert "hostile.py:by_order': the import takes 0 s so far" in caplog.text


def test_the_kind_of_a_reward_is_in_its_parameters():
    assert kind_of(hostile.ranks) == (True, False, None)
    assert kind_of(hostile.awaited) == (False, True, None)
    assert kind_of(hostile.with_fields) == (False, False, None)


@pytest.mark.parametrize(
    ("function", "pools", "message"),
    [
        ("asks_a_judge", [], "it asks engines of a pool 'judge', and the job has no other than "
         r"rollout; add a table \[engines.judge\]"),
        ("asks_a_judge", ["grader"], "of a pool 'judge', and the job has grader; add a table"),
        ("asks_somebody", [], "it asks engines, and the job has no other than rollout"),
        ("asks_without_waiting", ["judge"], "takes `engines`, which are waited for; write `async"),
    ],
)  # fmt: skip
def test_a_reward_that_asks_engines_is_refused_where_the_job_has_none(function, pools, message):
    with pytest.raises(ConfigError, match=message):
        trial.check(reward(function), Sample("yes"), pools)


@pytest.mark.parametrize("function", ["asks_a_judge", "asks_somebody"])
def test_a_reward_that_asks_engines_is_not_called_before_there_are_any(function):
    trial.check(reward(function), Sample("yes"), ["judge"])


def test_a_reward_is_given_the_engines_of_its_run():
    class Judge(dict):
        async def generate(self, text):
            return {"fine": "yes"}.get(text, "no")

    asked = Reward([Weighted(hostile.asks_a_judge, lambda: {"judge": Judge()})])
    assert asked.kind == Kind(False, True, ("judge",))
    scores = asyncio.run(asked([Sample("fine"), Sample("bad")], 5.0, lambda number: None))
    assert values(scores) == [1, 0]


class Events:
    def __init__(self):
        self.all = []

    def emit(self, event, **fields):
        self.all.append((event, fields))


@pytest.mark.parametrize(("responses", "expected"), [
    (["raise", "ab", "exit"], [(2, 3)]), (["ab", "abc"], []),
])  # fmt: skip
def test_errors_are_counted_in_events_with_all_that_was_scored_since(responses, expected):
    events = Events()

    async def score():
        async with Scorer(reward("by_order", workers=1), events) as scorer:
            for response in responses:
                await scorer.score([Sample(response)])

    asyncio.run(score())
    found = [fields for event, fields in events.all if event == "reward_errors"]
    assert sum(each["num_errors"] for each in found) == sum(count for count, _ in expected)
    assert sum(each["num_samples"] for each in found) == sum(count for _, count in expected)
    if expected:
        assert found[0]["first"].startswith("ZeroDivisionError: division by zero (hostile.py:")
        assert found[0]["num_samples"] == 1, "the first is said at once"


def test_errors_of_held_out_prompts_are_counted_by_themselves(caplog):
    events = Events()

    async def score():
        async with Scorer(reward("by_order", workers=1), events) as scorer:
            for response, heldout in (("raise", True), ("raise", False), ("ab", True)):
                await scorer.score([Sample(response)], heldout=heldout)

    asyncio.run(score())
    found = [fields for event, fields in events.all if event == "reward_errors"]
    counts = [(each["heldout"], each["num_errors"], each["num_samples"]) for each in found]
    assert sorted(counts) == [(False, 1, 1), (True, 0, 1), (True, 1, 1)]
    assert "1 of 1 held-out rewards failed; the first: ZeroDivisionError" in caplog.text
    assert "1 of 1 rewards failed; the first: ZeroDivisionError" in caplog.text
