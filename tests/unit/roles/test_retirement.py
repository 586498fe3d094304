"""Prompts that are solved often enough are passed over, whoever is killed when."""

import asyncio
import random
import threading
from types import SimpleNamespace

import pytest
from episode_fakes import Board, NoEnd, answer, episodes
from role_fakes import Events, config

from relax_hpc.bus import layout, plan, staleness
from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import Credit, CreditTail
from relax_hpc.bus.plan import SkippedGroup, read_chain
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.data.source import Prompt
from relax_hpc.errors import ConfigError, PeerTimeoutError
from relax_hpc.roles.dealing.portions import judge_of, with_skipped
from relax_hpc.roles.rollout import loop as rollout
from relax_hpc.roles.rollout import skips
from relax_hpc.roles.rollout.episodes import Grouper, seed_of
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.roles.rollout.heldout import Evaluator
from relax_hpc.runtime.paths import RunPaths

ROWS, P, STEPS, LAG, SIBLINGS = 10, 4, 12, 1, 2
SOLVED = range(4)
"""Rows of the data that every sibling solves; of the others one does."""


def settings(tmp_path, **more):
    return config(
        run_root=str(tmp_path), algorithm__groups__name="refill", prompts__retire_after=2,
        schedule__num_steps=STEPS, schedule__prompts_per_step=P, schedule__max_staleness=LAG,
        rollout__samples_per_prompt=SIBLINGS, rollout__advanced__groups_per_shard=1, **more,
    )  # fmt: skip


class Epochs:
    """Rows in the order of the file, epoch after epoch."""

    async def fetch(self, guid):
        return Prompt(guid % ROWS, [7, guid % ROWS], str(guid % ROWS))


class Engines:
    """Answers with the number of the sibling, and notes which groups it was asked for."""

    def __init__(self):
        self.now, self.asked, self.answers = 0, set(), 0

    async def version(self):
        return self.now

    async def sample(self, given, draft, how, *, seed, homes):
        guid = homes[1]
        self.asked.add(guid)
        self.answers += 1
        sibling = [seed_of(0, guid, each) for each in range(SIBLINGS)].index(seed)
        return answer(draft, [sibling], [-0.5], [(0, self.now)])


def score(response, sample):
    return 1.0 if int(sample.answer) in SOLVED else float(response[0])


async def sample(made, paths, engines):
    """A life of the rollout task."""
    judged = episodes(made, engines, score)
    group = Grouper(made, Epochs(), judged, skips.retirement_of(made, paths))
    evaluator = Evaluator(made, {"heldout": []}, judged, Events(), Board())
    with Folders.open(paths.bus, 0, 1, {}) as folders:
        credits = CreditTail(paths.bus)
        rest = Events(), NoEnd(), skips.TaskSkips(made, folders)
        await rollout.run(made, engines, group, evaluator, folders, credits, *rest)


async def train(made, paths, engines, checkpoint):
    """A life of the trainer, which saves after every third step."""
    sequencer = Sequencer(
        paths.bus, prompts_per_step=P, position=checkpoint.get("position"),
        max_staleness=LAG, judge=judge_of(made),
    )  # fmt: skip
    with sequencer:
        for step in range(checkpoint.get("step", 0) + 1, STEPS + 1):
            while True:
                try:
                    sequencer.next_portion(step, timeout_s=-1)
                    break
                except PeerTimeoutError:
                    await asyncio.sleep(0.001)
            engines.now = max(step, engines.now)
            sequencer.advance(step=step, policy_version=step)
            if step % 3 == 0:
                checkpoint |= {"step": step, "position": sequencer.position}
                sequencer.release(step)
            await asyncio.sleep(0)
        sequencer.finish()


async def live(made, paths, engines, dice):
    """Both to their ends; they die now and then."""
    checkpoint, running = {}, {}
    lives = {
        "train": lambda: train(made, paths, engines, checkpoint),
        "sample": lambda: sample(made, paths, engines),
    }
    deadline, seen = asyncio.get_running_loop().time() + 60, 0
    while len([each for each in running.values() if each.done() and not each.cancelled()]) < len(
        lives
    ):
        for name, begin in lives.items():
            if name not in running or running[name].cancelled():
                running[name] = asyncio.create_task(begin())
        await asyncio.sleep(0.001)
        if dice and engines.answers >= seen and sum(engines.deaths.values()) < 12:
            seen, name = engines.answers + dice.randrange(12), dice.choice(list(lives))
            if running[name].cancel():
                engines.deaths[name] += 1
                await asyncio.wait([running[name]])
        assert asyncio.get_running_loop().time() < deadline, "it does not end"
    for each in running.values():
        each.result()


@pytest.mark.parametrize("seed", [None, 0])
def test_a_prompt_that_two_groups_solved_is_passed_over_from_then_on(tmp_path, monkeypatch, seed):
    """A span is of 8 guids: what is retired in 24 .. 31 follows from the guids below 16."""
    monkeypatch.setattr(staleness, "SPAN_BATCHES", 1)
    monkeypatch.setattr(skips, "LOOK_EVERY_S", 0.002)
    monkeypatch.setattr(rollout, "POLL_S", 0.002)
    made = settings(tmp_path)
    paths, engines = RunPaths(made.run_dir), Engines()
    engines.deaths = {"train": 0, "sample": 0}
    layout.create(paths.bus, ["rollout-0"], {})
    asyncio.run(live(made, paths, engines, seed is not None and random.Random(seed)))
    assert seed is None or all(engines.deaths.values())
    # Of the 8 epochs the first three have them; by guid 30 they were solved below 16 twice.
    teaching = [guid for guid in range(8 * ROWS) if guid % ROWS not in SOLVED]
    chain = read_chain(paths.bus)
    assert [step.guids for step in chain.steps] == [
        teaching[lo : lo + P] for lo in range(0, P * STEPS, P)
    ]
    last = teaching[P * STEPS - 1]
    skipped = {group.guid: group for group in chain.skipped if group.guid < last}
    assert sorted(skipped) == [guid for guid in range(last) if guid % ROWS in SOLVED]
    assert {guid for guid, group in skipped.items() if group.retired} == {
        guid for guid in skipped if guid >= 3 * ROWS
    }
    assert all(group.solved for group in skipped.values())
    assert {group.reward for group in skipped.values() if group.retired} == {None}
    assert not [guid for guid in engines.asked if guid >= 3 * ROWS and guid % ROWS in SOLVED]
    counts = audit(paths.bus)
    # U03: nothing was passed over of which the plan says nothing.
    assert (counts.planned, counts.planned_twice) == (P * STEPS * SIBLINGS, 0)
    assert (counts.dropped, counts.duplicates) == (0, 0)
    assert counts.retired >= 4 * len(SOLVED) * SIBLINGS
    assert counts.skipped == counts.retired + 3 * len(SOLVED) * SIBLINGS
    # What nobody was asked for has no reward, and is no sample.
    said = with_skipped({"reward/mean": 0.5}, list(skipped.values())[-P:], made)
    assert (said["reward/sampled"], said["groups/skipped_retired"]) == (0.5, P)


def test_groups_count_that_were_sampled_and_solved_and_lie_in_front():
    def skip(guid, row, **kwargs):
        return SkippedGroup(guid, "u", 2, 1, row, **{"solved": True, "reward": 1.0, **kwargs})

    skipped = [
        skip(0, 5), skip(10, 5), skip(1, 6), skip(20, 6), skip(2, 7, solved=False), skip(12, 7),
        skip(3, 8, truncated=True), skip(13, 8), skip(4, 9, retired=True), skip(14, 9),
    ]  # fmt: skip

    def retired(below, times):
        solved = skips.Solved(times)
        solved.add(reversed(skipped))
        return {row for row in range(10) if solved.is_retired(row, below)}

    assert retired(20, 2) == {5}
    assert retired(21, 2) == {5, 6}
    assert retired(20, 1) == {5, 6, 7, 8, 9}


class Plan:
    """Row 5 is solved by guid 3; a look takes as long as somebody holds it up."""

    def __init__(self):
        self.begun, self.goes_on, self.looks = threading.Event(), threading.Event(), 0
        self._left = [(1, SkippedGroup(3, "u", 2, 1, 5, solved=True, reward=1.0))]

    def look(self):
        self.looks += 1
        self.begun.set()
        assert self.goes_on.wait(10)
        found, self._left = self._left, []
        return found


async def test_what_is_looked_up_is_known_though_who_asked_is_broken_off_meanwhile(tmp_path):
    paths = RunPaths(tmp_path)
    layout.create(paths.bus, ["rollout-0"], {})
    decides = skips.Retirement(paths.bus, 1, 8)
    decides._credits = SimpleNamespace(latest=lambda: Credit(judged_guid_below=8))
    decides._plan = Plan()

    first = asyncio.create_task(decides(16, 5))
    await asyncio.to_thread(decides._plan.begun.wait, 10)
    first.cancel()
    await asyncio.wait([first])
    again = asyncio.create_task(decides(16, 5))
    await asyncio.sleep(0.01)
    decides._plan.goes_on.set()
    assert first.cancelled() and await again and decides._plan.looks == 1


def test_each_record_of_the_plan_is_read_once_however_long_the_run_is(tmp_path, monkeypatch):
    """A task that reads all of the plan for every span takes longer and longer, and more memory."""
    monkeypatch.setattr(staleness, "SPAN_BATCHES", 1)
    monkeypatch.setattr(skips, "LOOK_EVERY_S", 0.002)
    monkeypatch.setattr(rollout, "POLL_S", 0.002)
    read, parse = [], plan.parse
    monkeypatch.setattr(plan, "parse", lambda record: read.append(record) or parse(record))
    chains, read_whole = [], plan.read_chain

    def read_chain_counted(*args, **kwargs):
        chains.append(kwargs)
        return read_whole(*args, **kwargs)

    monkeypatch.setattr(plan, "read_chain", read_chain_counted)
    made = settings(tmp_path)
    paths, engines = RunPaths(made.run_dir), Engines()
    layout.create(paths.bus, ["rollout-0"], {})
    asyncio.run(live(made, paths, engines, None))
    num_read = len(read)
    records = [each.record._asdict() for each in read_chain(paths.bus).records]
    assert len(chains) == 1, "the plan is read as a whole only where a trainer begins"
    assert len(records) / 2 < num_read <= len(records)


def test_a_job_whose_plan_has_no_record_of_solved_prompts_is_refused():
    refill = {"prompts__retire_after": 2, "algorithm__groups__name": "refill"}
    with pytest.raises(ConfigError, match=r"retire_after = 2: .*'as_sampled' trains on"):
        config(**refill | {"algorithm__groups__name": "as_sampled"})
    with pytest.raises(ConfigError, match=r"retire_after = 2: with schedule.over_age = 'mask'"):
        config(**refill, schedule__over_age="mask")
