"""Why rollout waits: each reason by what leads to it, and where it is told."""

import asyncio
import errno
import time
from pathlib import Path
from types import SimpleNamespace

import episode_fakes
import pytest
from episode_fakes import answer
from role_fakes import Events, config

from relax_hpc.bus import durable
from relax_hpc.bus.credits import Credit
from relax_hpc.bus.durable import BusFullError
from relax_hpc.data.source import Prompt
from relax_hpc.roles.rollout import loop
from relax_hpc.runs import report
from relax_hpc.runtime.heartbeat import Doing

P, STEPS = 4, 2


def job(max_staleness=0, num_steps=STEPS):
    schedule = {"num_steps": num_steps, "prompts_per_step": P, "max_staleness": max_staleness}
    return config(schedule=schedule)


def test_the_reason_is_the_one_that_has_to_end_first():
    """Three steps of four groups, one policy ahead: group 8 needs policy 1, 12 a fourth step."""
    pace = loop.Pace(job(max_staleness=1, num_steps=3))
    assert pace.wait_reason(0, None) == "no_engine"
    assert pace.wait_reason(7, 0) is None
    assert pace.wait_reason(8, 0) == "max_staleness"
    assert pace.wait_reason(8, 1) is None
    assert pace.wait_reason(12, 3) == "last_step"
    assert pace.wait_reason(12, None) == "last_step", "an engine would change nothing"
    for guid, version in ((0, 0), (0, None), (8, 0), (12, 3)):
        assert pace.wait_reason(guid, version, disk_full=True) == "disk_full"
        assert pace.wait_reason(guid, version, disk_full=True, is_ending=True) == "ending"


class Sampler:
    now = None

    async def version(self):
        return self.now

    async def sample(self, given, draft, how, *, seed, homes):
        return answer(draft, [1], [-0.5], [(0, self.now)])


class Folder(episode_fakes.Folder):
    """The bus; at first without room for `refuses` shards."""

    def __init__(self, refuses=0):
        super().__init__()
        self.refuses = refuses

    def put(self, groups):
        self.refuses -= 1
        if self.refuses >= 0:
            raise BusFullError(Path("shard"), OSError(errno.ENOSPC, "no space left"))


class End(episode_fakes.NoEnd):
    """An end that is announced while the task says that it waits for the trainer, and called off
    once it has said that it waits for the end."""

    def __init__(self, said, is_announced):
        self.said, self.is_announced = said, is_announced

    def is_near(self):
        waits = "waits (max_staleness)" in self.said and "waits (ending)" not in self.said
        return self.is_announced and waits


def follow(script, monkeypatch, folder, *, is_announced=False):
    """Runs the loop of a task.

    Args:
        script: from what the task says to the credit and the engines' policy from then on.

    Returns:
        What it said in turn, and its events.
    """
    said, events, sampler = [], Events(), Sampler()
    monkeypatch.setattr(
        loop.heartbeat, "say", lambda what: None if said[-1:] == [what] else said.append(what)
    )

    class Credits:
        credit = Credit()

        def latest(self):
            if (found := script.pop(said[-1] if said else "", None)) is not None:
                self.credit, sampler.now = found
            return self.credit

    prompts = [Prompt(index=i, token_ids=[7], answer="1") for i in range(P * STEPS)]
    end, heldout = End(said, is_announced), [Prompt(0, [9], "h")]
    running = episode_fakes.run(
        job(), prompts, heldout, sampler, lambda *_: 1.0, folder, Credits(), events, end
    )
    asyncio.run(asyncio.wait_for(running, 20))
    return said, events


def credit(step, finished=False):
    return Credit(step=step, policy_version=step, finished=finished)


def test_a_task_says_in_turn_what_it_waits_for(monkeypatch):
    script = {
        "waits (no_engine)": (credit(0), 0),
        "waits (max_staleness)": (credit(1), 1),
        "waits (last_step)": (credit(2, finished=True), 1),
        "waits (last_evaluation)": (credit(2, finished=True), 2),
    }
    said, events = follow(script, monkeypatch, Folder())
    assert said == [
        "waits (no_engine)", "sampling (next: max_staleness)", "waits (max_staleness)",
        "sampling (next: last_step)", "waits (last_step)", "waits (last_evaluation)",
    ]  # fmt: skip
    first, second = events.of("waits")
    assert first.pop("step") == 1 and second.pop("step") == 2
    assert first.keys() == {"time/no_engine", "time/sampling", "time/max_staleness"}
    assert second.keys() == {"time/sampling", "time/last_step"}


def test_a_full_disk_and_an_announced_end_are_told_before_what_else_holds(monkeypatch):
    monkeypatch.setattr(durable, "FULL_RETRY_S", 0.2)
    script = {"": (credit(0), 0), "waits (ending)": (credit(2, finished=True), 2)}
    said, _ = follow(script, monkeypatch, Folder(refuses=1), is_announced=True)
    waits = [each for each in said if each.startswith("waits")]
    assert waits == [
        "waits (disk_full)", "waits (max_staleness)", "waits (ending)", "waits (last_evaluation)",
    ]  # fmt: skip


def test_seconds_are_of_what_it_did_until_it_did_something_else(monkeypatch):
    """In step 1 it samples for 7 s, then waits for 2 s; of step 2 the wait goes on for 4 s."""
    now, events = [100.0], Events()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waits = loop.WaitTimes(events)
    for seconds, reason, step, is_sampling in (
        (0, "max_staleness", 0, True), (3, "max_staleness", 0, True),
        (4, "max_staleness", 0, False), (2, "max_staleness", 1, False),
        (4, "last_step", 1, True), (1, "last_step", 2, False), (9, "last_step", 2, False),
    ):  # fmt: skip
        now[0] += seconds
        waits.note(reason, step=step, is_sampling=is_sampling)
    assert events.of("waits") == [
        {"step": 1, "time/sampling": 7.0, "time/max_staleness": 2.0},
        {"step": 2, "time/max_staleness": 4.0, "time/sampling": 1.0},
    ]


def test_a_task_that_goes_on_at_a_later_step_has_no_event_of_earlier_ones():
    events = Events()
    waits = loop.WaitTimes(events)
    for step in (5, 5, 6):
        waits.note("max_staleness", step=step, is_sampling=False)
    assert [event["step"] for event in events.of("waits")] == [6]


@pytest.mark.parametrize("phase", ["waits (max_staleness)", "sampling (next: last_step)"])
def test_status_says_since_when_a_task_waits_and_why(phase):
    doing = [Doing("rollout", rank, "n1", phase, 0, 340.2, time.time() - 7) for rank in (0, 1)]
    assert report.doing(SimpleNamespace(doing=doing)) == [
        ("doing", f"rollout: {phase}, for 340 s (7 s ago)")
    ]
