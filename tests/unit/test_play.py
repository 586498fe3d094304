"""`relax-hpc check --play`: an episode that is shown before there are engines, or refused."""

import json
import os
import sys
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

class Anew(Twice):
    async def rollout(self, prompt, session):
        await session.chat()
        await session.chat([{"role": "user", "content": "2+2="}])
        return Outcome()

class Broken:
    async def rollout(self, prompt, session):
        return {"1": 1}[(await session.chat()).text]

class Endless:
    async def rollout(self, prompt, session):
        while True:
            await session.chat(session.messages)
"""
AGENT = """
import json, os, sys, urllib.request
task = json.load(open(sys.argv[1]))
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "policy", "messages": task["messages"]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
json.dump({"rewards": {"right": 2.0 * (said == task["answer"])}}, open(sys.argv[2], "w"))
"""


def arguments(*options, environment=None, **keys):
    if environment:
        Path("own.py").write_text(OWN, encoding="utf-8")
        keys["rollout.environment"] = f"own.py:{environment}"
    return ("check", "job.toml", "--local", *options, *(f"--set={k}={v}" for k, v in keys.items()))


def shown(said):
    """The lines of the episode, and the one of what came of it."""
    lines = said.splitlines()
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
    said = remarked(*arguments("--play", "--reply", "30", "--reply=2", environment="Twice"))
    episode, outcome = shown(said)
    assert [line for line in episode if "tokens" in line] == [
        "given, 10 tokens", "said by the policy, 3 tokens, trained on",
        # A newline, 2 for the role, 5 for sure?, its end and a newline, 2 for the role.
        "given by the environment, 12 tokens", "said by the policy, 2 tokens, trained on",
    ]  # fmt: skip
    assert "30<|im_end|>" in episode and "sure?<|im_end|>" in episode
    assert outcome == (
        "played an episode: 2 replies, 5 tokens trained on; reward 1 (right 1); metrics (length 2)"
    )
    assert said.splitlines()[-1].endswith(
        "relax-hpc submit job.toml --local --set=rollout.environment=own.py:Twice"
    ), "how to submit names neither option"


def test_a_history_that_is_written_anew_is_a_sequence_of_its_own(remarked):
    episode, outcome = shown(remarked(*arguments("--play", environment="Anew")))
    assert episode.count("a history of its own, so another sequence:") == 1
    assert sum(line.startswith("given,") for line in episode) == 2
    assert "2 replies, 4 tokens trained on" in outcome


def test_a_program_is_started_with_the_prompt_and_answered(remarked):
    Path("agent.py").write_text(AGENT, encoding="utf-8")
    command = json.dumps([sys.executable, "agent.py", "{task}", "{outcome}"])
    keys = {"rollout.environment": "program", "rollout.program.command": command}
    _, outcome = shown(remarked(*arguments("--play", **keys)))
    assert "reward 2 (right 2)" in outcome


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
        "environment: KeyError: '2' (own.py:20); correct it"
    )


def test_an_episode_without_an_end_is_refused_though_its_conversation_is_full(refused, monkeypatch):
    monkeypatch.setattr(play, "LONGEST_S", 1.0)
    asked = arguments("--play", environment="Endless")
    said = refused(*asked)
    assert "own.py:Endless': " in said and said.endswith(
        "has not ended after 1 s; let it end, or say more with --reply"
    )


def test_replies_without_an_episode_are_refused(refused):
    assert refused(*arguments("--reply", "1")) == "--reply: is of an episode; add --play"


def test_a_reply_is_as_long_as_there_is_room_and_ends_with_what_ends_one(remarked):
    keys = {"rollout.max_new_tokens": 3, "prompts.max_prompt_tokens": 20}
    _, outcome = shown(remarked(*arguments("--play", "--reply=12345", **keys)))
    assert "1 reply, 3 tokens trained on" in outcome
    keys = {"rollout.stop": '["3"]'}
    _, outcome = shown(remarked(*arguments("--play", "--reply=12345", **keys)))
    assert "1 reply, 3 tokens trained on" in outcome, "1, 2, 3"
