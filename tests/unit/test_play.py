"""`relax-hpc check --play`: an episode that is shown before there are engines, or refused."""

import os
from pathlib import Path

from relax_hpc.roles.rollout import play

OWN = """
import asyncio
from relax_hpc import Outcome

class Twice:
    async def rollout(self, prompt, session):
        first = await session.chat()
        more = {"role": "user", "content": "sure?"}
        second = await session.chat([*session.messages, more])
        return Outcome({"right": float(second.text == prompt.answer)}, {"length": len(first.text)})

class Broken:
    async def rollout(self, prompt, session):
        return {"1": 1}[(await session.chat()).text]

class Endless:
    async def rollout(self, prompt, session):
        while True:
            await session.chat(session.messages)
"""


def arguments(*options, environment=None, **keys):
    if environment:
        Path("own.py").write_text(OWN, encoding="utf-8")
        keys["rollout.environment"] = f"own.py:{environment}"
    return ("check", "job.toml", "--local", *options, *(f"--set={k}={v}" for k, v in keys.items()))


def shown(said):
    """The lines of the episode, and the one of what came of it."""
    lines = [line for line in said.splitlines() if not line.startswith("weights: ")]
    [outcome] = [line for line in lines if line.startswith("played")]
    until = lines.index(next(line for line in lines if "are trained on" in line or line == outcome))
    return lines[:until], outcome


def test_the_answer_is_said_and_what_is_trained_on_is_shown_with_its_reward(remarked):
    episode, outcome = shown(remarked(*arguments("--play")))
    assert episode == [
        f"an episode of {Path('train.jsonl').absolute()}, line 1:",
        "given, 10 tokens", "<|im_start|>user", "1+1=<|im_end|>", "<|im_start|>assistant", "",
        "said by the policy, 2 tokens, trained on", "2<|im_end|>",
    ]  # fmt: skip
    # A bare number is in no box.
    assert outcome == ("played an episode: 1 reply, 2 tokens trained on; reward 0 (boxed_number 0)")


def test_replies_are_said_in_turn_to_an_environment_of_ones_own(remarked):
    asked = arguments("--play", "--reply", "30", "--reply=2", environment="Twice")
    episode, outcome = shown(remarked(*asked))
    assert [line for line in episode if "tokens" in line] == [
        "given, 10 tokens", "said by the policy, 3 tokens, trained on",
        # A newline, 2 for the role, 5 for sure?, its end and a newline, 2 for the role.
        "given by the environment, 12 tokens", "said by the policy, 2 tokens, trained on",
    ]  # fmt: skip
    assert "30<|im_end|>" in episode and "sure?<|im_end|>" in episode
    assert outcome == (
        "played an episode: 2 replies, 5 tokens trained on; reward 1 (right 1); metrics (length 2)"
    )


def test_the_last_of_the_replies_is_said_again(remarked):
    _, outcome = shown(remarked(*arguments("--play", "--reply=2", environment="Twice")))
    assert outcome.startswith("played an episode: 2 replies, 4 tokens trained on; reward 1 ")


def test_a_reward_that_asks_engines_is_not_asked(remarked):
    Path("judged.py").write_text(
        "async def score(response, engines):\n    return 1.0\n", encoding="utf-8"
    )
    path = os.fspath(Path("model").absolute())
    keys = {"reward.name": "judged.py:score", "engines.judge.model": path}
    _, outcome = shown(remarked(*arguments("--play", **keys)))
    assert outcome.endswith("its reward asks engines of the run, of which there are none now")


def test_an_environment_that_fails_is_refused_with_its_line(refused):
    said = refused(*arguments("--play", environment="Broken")).splitlines()[-1]
    assert said == (
        f"{Path('train.jsonl').absolute()}, line 1: an episode in which the policy says '2' fails: "
        "environment: KeyError: '2' (own.py:14); correct it"
    )


def test_an_episode_without_an_end_is_refused_though_its_conversation_is_full(refused, monkeypatch):
    monkeypatch.setattr(play, "LONGEST_S", 1.0)
    asked = arguments("--play", environment="Endless")
    said = refused(*asked)
    assert "own.py:Endless': " in said and said.endswith(
        "has not ended after 1 s; let it end, or say more with --reply"
    )
