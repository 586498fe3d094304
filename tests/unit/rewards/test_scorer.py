"""Rewards in worker processes: what they may do, and whom it costs."""

import asyncio
import json
import os
import signal
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock
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
from relax_hpc.environments.rewards.contract import Kind, Reward, Sample, Score, Weighted
from relax_hpc.environments.rewards.functions.boxed_number import score as boxed_number
from relax_hpc.environments.rewards.scorer import Scorer
from relax_hpc.errors import ConfigError

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


def test_built_in_rewards_score_in_a_process_of_their_own_without_torch():
    config = RewardConfig(name="boxed_number", advanced={"workers": 1})
    assert values(scores_of(config, [r"\boxed{7}", "7"], answer="7")[0]) == [1, 0]
    [[score]] = scores_of(reward("has_torch"), ["a"])
    assert score == Score(0.0)


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("hang", "took longer than 1 s"),
        ("blocked", "took longer than 1 s"),
        ("fork", "took longer than 1 s"),
        ("sys.exit", "ended with"),
        ("orphan", "ended with 0"),
        ("segfault", "SIGSEGV"),
        ("raise", "ZeroDivisionError: division by zero"),
        ("memory", "MemoryError"),
        ("socket", "nonsense"),
    ],
)
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

    assert asyncio.run(ticks()) > 3


def test_whoever_waits_is_told_that_a_lost_worker_cannot_be_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(scorer_module, "START_AGAIN_S", 0.01)
    file = tmp_path / "mine.py"
    file.write_text("import os\ndef score(response):\n    os.kill(os.getpid(), 9)\n")

    async def run():
        config = RewardConfig(name=f"{file}:score", advanced={"workers": 1})
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

    before = family()
    asyncio.run(close())
    assert family() <= before


def test_a_process_that_keeps_memory_is_replaced():
    async def replaced():
        async with Scorer(RewardConfig(name="random", advanced={"workers": 1})) as scorer:
            [first] = [w for w in scorer._workers if w.pid in scorer.pids][:1]
            await scorer.score([Sample("a")])
            first.kept_bytes = 2 << 30
            for _ in range(3):
                await scorer.score([Sample("a")])
            async with asyncio.timeout(60):
                while first.pid in scorer.pids:
                    await asyncio.sleep(0.05)
            return scorer.pids

    assert asyncio.run(replaced())


def test_fields_of_a_sample_are_given_by_name():
    sample = Sample("ab", answer="a", metadata={"suffix": "b"})
    assert in_processes(reward("with_fields", workers=1), [sample]) == [[Score(1.0)]]


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
    [[found]] = in_processes(reward("metadata", workers=1), [Sample("a", metadata=metadata)])
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
        ("no_such.module:score", "No module named 'no_such'"),
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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1 / 0", "division by zero"),
        ("def score(:", "SyntaxError"),
    ],
)
def test_a_file_that_raises_while_it_is_imported_is_refused_with_what_it_raised(
    tmp_path, line, words
):
    path = tmp_path / "mine.py"
    path.write_text(f"{line}\ndef score(response, answer): return 1.0\n")
    said = refusal(RewardConfig(name=f"{path}:score"), Sample("1", answer="1"))
    assert words in said and f"reward.name = '{path}:score'" in said


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
        ("asks_a_judge", [], "it asks engines of a pool 'judge', and the job has no other than "
         "rollout; add a table [engines.judge]"),
        ("asks_somebody", [], "it asks engines, and the job has no other than rollout"),
        ("asks_without_waiting", ["judge"], "takes `engines`, which are waited for; write `async"),
    ],
)  # fmt: skip
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


def test_errors_are_counted_in_events_with_all_that_was_scored_since():
    assert errors_of(("ab", False), ("abc", False)) == []
    found = errors_of(("raise", False), ("ab", False), ("exit", False))
    assert sum(each["num_errors"] for each in found) == 2
    assert sum(each["num_samples"] for each in found) == 3
    assert found[0]["first"].startswith("ZeroDivisionError: division by zero (hostile.py:")
    assert found[0]["num_samples"] == 1, "the first is said at once"


def test_errors_of_held_out_prompts_are_counted_by_themselves(caplog):
    found = errors_of(("raise", True), ("raise", False), ("ab", True))
    counts = [(each["heldout"], each["num_errors"], each["num_samples"]) for each in found]
    assert sorted(counts) == [(False, 1, 1), (True, 0, 1), (True, 1, 1)]
    assert "1 of 1 held-out rewards failed; the first: ZeroDivisionError" in caplog.text
    assert "1 of 1 rewards failed; the first: ZeroDivisionError" in caplog.text


LINES = """\
import json, helper
from relax_hpc.environments.rewards.functions.boxed_number import score as boxed

def score(response):
    if response == "helper":
        return helper.halve(response)
    if response == "library":
        return json.loads("no")
    if response == "ours":
        return boxed(7, 7)
    if response == "text":
        return "1"
    if response == "long":
        raise ValueError("x" * 1000)
    if response == "built":
        return eval("1 / 0")
    return float(response.split("{")[1])

async def waits(response):
    return score(response)

def of_group(group):
    for sample in group:
        yield score(sample.response)
"""


@pytest.fixture
def lines(tmp_path):
    """A program whose every failure has a line of its own."""
    (tmp_path / "mine.py").write_text(LINES)
    (tmp_path / "helper.py").write_text("def halve(text):\n    return text / 2\n")
    return tmp_path / "mine.py"


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("177", "IndexError: list index out of range (mine.py:17)"),
        ("helper", "TypeError: unsupported operand type(s) for /: 'str' and 'int' (helper.py:2)"),
        ("library", "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (mine.py:8)"),
        ("ours", "(mine.py:10)"),
        ("text", "TypeError: gave no number, and no relax_hpc.Score, but '1'"),
        ("long", "ValueError: " + "x" * 175 + " ... " + "x" * 520 + " (mine.py:14)"),
        ("built", "ZeroDivisionError: division by zero (mine.py:16)"),
    ],
)
@pytest.mark.parametrize("function", ["score", "waits", "of_group"])
def test_a_reward_that_fails_is_refused_with_the_response_and_its_own_line(
    lines, function, response, words
):
    config = RewardConfig(terms={"a" * 40: {"name": f"{lines}:{function}"}})
    said = refusal(config, Sample(response))
    assert f"scoring the response '{response}' to a prompt of yours, aaa" in said
    assert said.endswith(f"{words}; correct it")


def test_what_is_built_in_fails_without_a_line_of_ours():
    [score] = scores_here(Reward([Weighted(boxed_number)]), Sample(7, answer="7"))
    assert score.error and ".py:" not in score.error
