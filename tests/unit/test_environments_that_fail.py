"""What an environment raises, or returns amiss, is an error of that sample; what engines raise
is none of it."""

import asyncio
import json
import re
import signal
import sys
from types import SimpleNamespace

import pytest
from episode_fakes import Numbers, answer
from roles.role_fakes import config

from relax_hpc.config.rollout import RolloutConfig
from relax_hpc.data.source import Prompt
from relax_hpc.environments import registry
from relax_hpc.environments.record import EpisodeRecord
from relax_hpc.environments.rewards import worker
from relax_hpc.environments.rewards.contract import Score
from relax_hpc.environments.session import Outcome
from relax_hpc.errors import ConfigError, DeadlyRequestError, EngineLostError
from relax_hpc.roles.rollout.episodes import Episodes, rows_of
from relax_hpc.runtime.files import user_programs
from relax_hpc.schema import FinishReason

PROMPT = Prompt(0, [1], "7", [{"role": "user", "content": "1"}], where="p.jsonl:7")


class Engine:
    """Says 5 and the end; fails where it is told to."""

    def __init__(self, error=None):
        self.error = error

    async def sample(self, given, draft, how, *, seed, homes):
        if self.error:
            raise self.error
        return answer(draft, [5], [-1.0], [(0, 0)])


def played(rollout, *, engine=None, count=2, score=0.25, noted=lambda scores, _: scores):
    """Episodes of a prompt: `rollout` is given the number of the episode, too."""
    seeds = list(range(count))

    async def run(prompt, session):
        return await rollout(session, session.seed)

    async def scores(group):
        return [Score(score) for _ in group]

    environment = SimpleNamespace(rollout=run)
    made = Episodes(
        config(), environment, engine or Engine(), Numbers(), scores, max_tokens=99, noted=noted
    )
    records = [EpisodeRecord() for _ in seeds]
    return asyncio.run(made.run(PROMPT, records, made.how(1.0), 3, seeds))


def test_an_episode_that_raises_has_its_reason_and_line_and_its_siblings_their_rewards():
    async def rollout(session, number):
        if number == 0:
            raise ValueError("the world fell over")
        bad = Outcome({"right": float("nan")})
        return [Outcome({"right": 1.0}, {"turns": 2}), Outcome(), bad][number - 1]

    failed, right, scored, none = played(rollout, count=4)
    said = r"environment: ValueError: the world fell over \(test_environments_that_fail\.py:\d+\)"
    assert re.fullmatch(said, failed.score.error)
    assert failed.metrics == {}
    assert (right.score, right.metrics) == (Score(1.0, {"right": 1.0}), {"turns": 2.0})
    assert (scored.score.value, scored.score.error) == (0.25, None)
    assert "TypeError: rollout returned right = nan, no finite number" in none.score.error


def test_a_request_that_engines_end_with_is_an_error_of_that_sample_and_no_end_of_the_run():
    """Whatever the environment makes of it, and though only a part of the response had come."""

    class Deadly(Engine):
        async def sample(self, given, draft, how, *, seed, homes):
            if seed == 1:
                answer(draft, [5], [-1.0], [(0, 0)])
                raise DeadlyRequestError("3 engines ended")
            return await super().sample(given, draft, how, seed=seed, homes=homes)

    async def rollout(session, number):
        try:
            await session.chat()
        except RuntimeError as error:
            raise ValueError from error
        return Outcome()

    fine, deadly = played(rollout, engine=Deadly())
    assert (fine.score.value, fine.score.error) == (0.25, None)
    assert deadly.score.error == "engines: 3 engines ended"
    (row,) = rows_of(3, 1, PROMPT, 1, deadly)
    assert (row.finish, row.loss_mask.tolist()) == (FinishReason.ABORT, [0, 1])


def test_scores_of_environments_are_counted_and_failed_ones_have_the_rewards_least():
    counted = []

    def noted(scores, _):
        counted.extend(scores)
        return [each if each.error is None else Score(-1.0, error=each.error) for each in scores]

    async def rollout(session, number):
        return Outcome({"right": 1.0}) if number else 1 / 0

    made = played(rollout, noted=noted)
    assert [each.error is None for each in counted] == [False, True]
    assert [each.score.value for each in made] == [-1.0, 1.0]


def test_what_engines_raise_is_raised_whatever_the_environment_makes_of_it():
    async def rollout(session, number):
        try:
            await session.chat()
        except Exception as error:
            raise ValueError("no answer") from error

    with pytest.raises(EngineLostError, match=r"^p\.jsonl:7, group 3: http://x: gone$"):
        played(rollout, engine=Engine(EngineLostError("http://x: gone")))
    with pytest.raises(KeyError, match="ours"):
        played(rollout, engine=Engine(KeyError("ours")))


def test_an_environment_that_got_an_answer_after_all_fails_by_itself():
    engine = Engine(EngineLostError("http://x: gone"))

    async def rollout(session, number):
        try:
            await session.chat()
        except EngineLostError:
            engine.error = None
        await session.chat()
        raise ValueError("later")

    [made] = played(rollout, engine=engine, count=1)
    assert "ValueError: later" in made.score.error


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """Why an environment of this text is refused; making it may take 1.5 s."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(user_programs, "PATIENCE_S", 1.5)
    monkeypatch.setattr(user_programs, "_TELL_S", 0.1)

    def of(text):
        (tmp_path / "mine.py").write_text(text)
        with pytest.raises(ConfigError) as error:
            registry.make(RolloutConfig(environment=f"{tmp_path}/mine.py:Mine"))
        return str(error.value)

    return of


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def rollout(self, prompt, session): ...", "rollout is awaited; write `async def"),
        ("async def rollout(self, prompt): ...", "called with a prompt and a session: too many"),
        ("__init__ = lambda self: exit(4)", "RuntimeError: it called sys.exit(4)"),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused(refusal, text, said):
    assert said in refusal(f"class Mine:\n    {text}\n")


def test_an_import_or_a_making_that_hangs_says_where_and_is_ended_though_it_catches_what_ends_it(
    refusal, tmp_path, caplog
):
    text = "import time\nclass Mine:\n    def __init__(self):\n        time.sleep(5)\n"
    said = "cannot be made: TimeoutError: making it takes longer than 1.5 s (mine.py:4); corr"
    assert said in refusal(text)
    own = signal.getsignal(signal.SIGALRM), bool(signal.getitimer(signal.ITIMER_REAL)[0])
    said = refusal("import time\ntry:\n    time.sleep(5)\nexcept Exception:\n    time.sleep(5)\n")
    assert "TimeoutError: the import takes longer than 1.5 s (mine.py:5); correct it" in said
    assert f"{tmp_path}/mine.py: the import takes 0 s so far, now at mine.py:3" in caplog.text
    timer = bool(signal.getitimer(signal.ITIMER_REAL)[0])
    assert (signal.getsignal(signal.SIGALRM), timer) == own
    with pytest.raises(ConfigError, match=r"longer than 1\.5 s \(mine\.py:5\)"):
        worker._reward(json.dumps([["", "mine", f"{tmp_path}/mine.py:score", 1.0, {}]]), None)
