"""Answers that hang, crash and flood a reward, among ordinary ones: they cost themselves."""

import asyncio
import os
import time
from pathlib import Path

import hostile
import psutil
import pytest
from roles.role_fakes import wait_for

from relax_hpc.config.rollout import RewardAdvanced, RewardConfig
from relax_hpc.environments.rewards.contract import Sample, Score
from relax_hpc.environments.rewards.scorer import Scorer

pytestmark = pytest.mark.long

DEADLINE_S = 0.5
CONFIG = RewardConfig(
    name=f"{hostile.__file__}:by_order",
    deadline_s=DEADLINE_S,
    advanced={"memory_gib": 0.25, "workers": 2},
)


@pytest.fixture
def leftover(tmp_path, monkeypatch):
    """Tells which of the processes are there that rewards have started, and noted."""
    noted = tmp_path / "pids"
    noted.touch()
    monkeypatch.setenv("HOSTILE_PIDS", str(noted))
    before = {each.pid for each in psutil.Process().children(recursive=True)}

    def look():
        pids = {int(line) for line in noted.read_text().split()}
        assert pids, "they did start some"
        below = {each.pid for each in psutil.Process().children(recursive=True)} - before
        return [said for pid in pids | below if (said := told(pid))]

    return look


def told(pid):
    """What is to be said of a process that is there; nothing of one that has ended."""
    try:
        known = psutil.Process(pid).as_dict(["pid", "ppid", "status", "create_time", "cmdline"])
    except psutil.NoSuchProcess:
        return {}
    return {} if known["status"] == psutil.STATUS_ZOMBIE else known


def test_hostile_answers_among_ordinary_ones_cost_themselves(leftover):
    """10,000 responses in groups of eight, one in 200 of which is hostile."""
    responses = ["x" * (n % 30 + 10) for n in range(10_000)]
    for number, place in enumerate(range(100, len(responses), 200)):
        responses[place] = hostile.HOSTILE[number % len(hostile.HOSTILE)]
    groups = [responses[first : first + 8] for first in range(0, len(responses), 8)]

    async def scored():
        async with Scorer(CONFIG) as scorer:
            asked = ([Sample(each) for each in group] for group in groups)
            return await asyncio.gather(*map(scorer.score, asked))

    for group, scores in zip(groups, asyncio.run(scored()), strict=True):
        for response, score in zip(group, scores, strict=True):
            if response in hostile.HOSTILE:
                assert score.value == 0 and score.error, response
            else:
                assert score == Score(float(len(response))), (group, scores)
    wait_for_the_end_of(leftover)


def test_who_leaves_no_memory_does_not_make_a_sibling_fail():
    async def score():
        async with Scorer(CONFIG) as scorer:
            return await scorer.score([Sample("threads"), Sample("needs memory")])

    bad, good = asyncio.run(score())
    assert bad.error and good == Score(64 << 20)


def test_every_hostile_answer_is_a_zero_with_an_error_soon_after_its_deadline(leftover):
    """Each after one that is scored: by then there is a process to ask."""
    seconds = {}

    async def score(scorer, responses):
        for response in responses:
            assert await scorer.score([Sample("ordinary")]) == [Score(8.0)]
            begun = time.monotonic()
            [found] = await scorer.score([Sample(response)])
            seconds[response] = time.monotonic() - begun
            assert found.value == 0 and found.error, response

    async def score_all():
        advanced = RewardAdvanced(memory_gib=0.25, workers=4)
        async with Scorer(CONFIG.model_copy(update={"advanced": advanced})) as scorer:
            await asyncio.gather(*(score(scorer, hostile.HOSTILE[n::3]) for n in range(3)))

    asyncio.run(score_all())
    assert {k: v for k, v in seconds.items() if v > DEADLINE_S + 5} == {}
    wait_for_the_end_of(leftover)


SLOW = """
import os, time
slow = [None]
os.register_at_fork(
    after_in_parent=lambda: slow and time.sleep(slow.pop() or 2), after_in_child=slow.clear
)
"""
"""For a process that has no CPU for a while, once it has forked the first time."""


@pytest.mark.parametrize("is_starved", [False, True])
def test_what_a_reward_started_ends_when_its_owner_is_killed(
    leftover, tmp_path, monkeypatch, is_starved
):
    """A process of its own is the owner: it is killed while a reward has forked and hangs."""
    if is_starved:
        (tmp_path / "sitecustomize.py").write_text(SLOW)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    owner = os.fork()
    if owner == 0:

        async def score():
            async with Scorer(CONFIG.model_copy(update={"deadline_s": 100.0})) as scorer:
                await scorer.score([Sample("forks")])

        try:
            asyncio.run(score())
        finally:
            os._exit(1)
    noted = Path(os.environ["HOSTILE_PIDS"])
    wait_for(lambda: len(noted.read_text(encoding="utf-8").split()) == 20)
    os.kill(owner, 9)
    os.waitpid(owner, 0)
    wait_for_the_end_of(leftover)


def wait_for_the_end_of(leftover):
    """Who was killed takes a moment to be gone."""
    wait_for(lambda: not leftover(), 20)
