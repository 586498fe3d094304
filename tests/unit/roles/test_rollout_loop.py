"""The rollout loop, its shards' events, and why it waits: what exactly is asked of whom."""

import asyncio
import errno
import itertools
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import episode_fakes
import pytest
from episode_fakes import answer
from role_fakes import Events, Journal, config, row

from relax_hpc.bus import durable
from relax_hpc.bus.credits import Credit, Owed
from relax_hpc.bus.durable import BusFullError
from relax_hpc.bus.layout import Deal, Deals
from relax_hpc.data.source import Prompt
from relax_hpc.environments.record import EpisodeRecord
from relax_hpc.errors import EngineUnfitError, RelaxError
from relax_hpc.inference.generation import Sampling
from relax_hpc.roles.rollout import loop
from relax_hpc.roles.rollout import loop as loop_module
from relax_hpc.roles.rollout.episodes import seed_of
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.roles.rollout.loop import publish
from relax_hpc.schema import PromptGroup

STEPS = 3


def owned_below(end, rank, size, committed, start):
    folder = SimpleNamespace(committed=committed)
    guids = Folders(Deals([Deal(0, size)]), rank, {rank: folder}).list_owed(start=start)
    return list(itertools.takewhile(lambda guid: guid < end, guids))


@pytest.mark.parametrize(
    ("start", "rank", "owned"),
    [(0, 0, [0, 2, 4, 6, 8]), (3, 0, [4, 6, 8]), (3, 1, [3, 5, 7, 9]), (4, 1, [5, 7, 9])],
)
def test_a_task_owns_every_prompt_of_its_rank_from_any_start_on(start, rank, owned):
    assert owned_below(10, rank, 2, set(), start) == owned
    assert owned_below(10, rank, 2, {owned[0]}, start) == owned[1:]


class Sampler:
    """Answers with a token per sibling; knows which prompt it is asked for by its token."""

    def __init__(self, version, journal):
        self.now, self.journal = version, journal

    async def version(self):
        return self.now

    async def sample(self, given, draft, how, *, seed, homes):
        self.journal.note("sample", list(given), seed, how)
        return answer(draft, [5], [-0.5], [(0, self.now)])


class Folder(episode_fakes.Folder):
    """Has committed some guids, and owes some again when the trainer says so."""

    def __init__(self, journal, committed=(), again=(), **of):
        super().__init__(**of)
        self.journal, self.committed, self.again = journal, set(committed), list(again)

    def owe_again(self, again):
        owed, self.again = (self.again, []) if again else ([], self.again)
        return owed

    def collect(self, retired_guid_below):
        self.journal.note("collect", retired_guid_below)

    def put(self, groups):
        self.journal.note("put", [group.guid for group in groups])


class Credits:
    """A trainer that has finished once `count` groups are there, and gave engines its weights."""

    def __init__(self, sampler, count, credit):
        self.sampler, self.count, self.credit = sampler, count, credit

    def latest(self):
        put = sum(len(guids) for _, guids in self.sampler.journal.of("put"))
        if put >= self.count:
            self.sampler.now = STEPS
        return self.credit._replace(finished=put >= self.count) if self.credit else None


def play(sampler, folder, credits, **settings):
    """The events of a whole run."""
    made = config(
        seed=3, schedule__num_steps=STEPS, schedule__prompts_per_step=4, schedule__max_staleness=1,
        rollout__temperature=0.6, rollout__advanced__groups_per_shard=1, **settings,
    )  # fmt: skip
    prompts = [Prompt(index=i, token_ids=[7, 100 + i], answer=str(i)) for i in range(12)]
    score, events = lambda *_: 1.0, Events()
    heldout = [Prompt(1, [9], "h")]
    loop = episode_fakes.run(made, prompts, heldout, sampler, score, folder, credits, events)
    asyncio.run(asyncio.wait_for(loop, 20))
    return events


PAIR = {"engines__rollout__count": 2, "algorithm__groups__name": "as_sampled"}


def run(*, version=2, committed=(), again=(), credit=None, count=4):
    journal = Journal()
    sampler = Sampler(version, journal)
    credit = credit or Credit(step=version, policy_version=version)
    folder = Folder(journal, committed, again, task=1, size=2)
    return journal, play(sampler, folder, Credits(sampler, count, credit), **PAIR)


def asked(journal):
    """Guids that training wants, in order; the held-out prompt has another token."""
    guids = [given[1] - 100 for _, given, _, _ in journal.of("sample") if given != [9]]
    return guids[::2]  # of two siblings


def test_every_prompt_of_the_task_is_asked_for_with_the_settings_of_the_run():
    journal, events = run(count=6)
    assert asked(journal) == [1, 3, 5, 7, 9, 11]
    sampled = [each for each in journal.of("sample") if each[1] != [9]]
    for number, (_, given, seed, how) in enumerate(sampled):
        guid = given[1] - 100
        assert given == [7, 100 + guid]
        assert seed == seed_of(3, guid, number % 2)
        # batch guid // 4 + 1 wants policy guid // 4, and takes the one before
        assert how == Sampling(0.6, 256, max_tokens=1 << 20, min_version=max(guid // 4 - 1, 0))
    assert sum(event["num_groups"] for event in events.of("shard")) == 6
    assert [e["when"] for e in events.of("eval")] == ["after"]  # not there from the start


def test_nothing_beyond_the_staleness_bound_is_started():
    journal, _ = run(version=0, count=4)
    assert asked(journal) == [1, 3, 5, 7]  # of batches 1 and 2


def test_what_is_skipped_lets_so_many_further_groups_be_started():
    credit = Credit(step=0, policy_version=0, batch_ends=(5, 11, 15))
    journal, _ = run(version=0, count=5, credit=credit)
    assert asked(journal) == [1, 3, 5, 7, 9]  # batch 2 ends at 11


def test_what_is_committed_is_not_sampled_and_what_is_owed_again_comes_first():
    credit = Credit(step=2, policy_version=2, owed=(Owed(7, "u"), Owed(5, "u")))
    journal, _ = run(committed={1, 5, 7}, again=[7, 5], credit=credit, count=5)
    assert asked(journal) == [5, 7, 3, 9, 11]


def test_what_is_owed_again_does_not_wait_behind_what_has_to_wait_for_a_newer_policy():
    journal = Journal()
    sampler = Sampler(0, journal)

    class Later:
        """Misses a shard once the rest that its policy may sample is there."""

        def latest(self):
            put = [guid for _, guids in journal.of("put") for guid in guids]
            owed = [Owed(7, "u"), Owed(5, "u")] * (sorted(put) == [1, 3, 5, 7])
            sampler.now = STEPS if len(put) == 6 else 0
            return Credit(finished=len(put) == 6, owed=owed)

    play(sampler, Folder(journal, again=[7, 5], task=1, size=2), Later(), **PAIR)
    assert asked(journal) == [1, 3, 5, 7, 5, 7]


def test_a_task_that_starts_late_begins_where_nothing_is_retired_and_deletes_what_is():
    credit = Credit(step=2, policy_version=2, retired_guid_below=6)
    journal, _ = run(credit=credit, count=3)
    assert asked(journal) == [7, 9, 11]
    assert set(journal.of("collect")) == {("collect", 6)}


def test_the_first_policy_and_the_last_are_evaluated_and_no_other():
    journal, events = run(version=0, credit=Credit(), count=4)
    assert [e["when"] for e in events.of("eval")] == ["before", "after"]
    journal, events = run(version=3, count=6)
    assert [(e["when"], e["version"]) for e in events.of("eval")] == [("after", 3)]
    assert journal[-1][1] == [9] and journal[-1][3] == Sampling(0.0, 256, max_tokens=1 << 20)


def test_a_start_that_finds_training_over_waits_for_the_last_policy_and_evaluates_it_once():
    journal = Journal()

    class Late(Sampler):
        """An engine of which the trainer hears only after a while."""

        async def version(self):
            self.journal.note("version")
            return STEPS if len(self.journal.of("version")) > 5 else None

    class Over:
        """The trainer before had finished; the one of now has to give engines the last policy."""

        def latest(self):
            return Credit(step=STEPS, policy_version=STEPS, finished=True)

    events = play(Late(STEPS, journal), Folder(journal, committed=range(12)), Over())
    assert [(e["when"], e["version"]) for e in events.of("eval")] == [("after", STEPS)]
    assert [given for _, given, *_ in journal.of("sample")] == [[9]]


def test_a_task_goes_on_if_a_trainer_comes_back_that_has_lost_the_last_step():
    journal = Journal()
    sampler = Sampler(1, journal)

    class Back:
        """Finished at first; then a trainer that wants a shard again, which was not whole."""

        looks = 0

        def latest(self):
            self.looks += 1
            is_back, put = self.looks > 2, journal.of("put")
            if put:
                sampler.now = STEPS
            return Credit(
                step=2, policy_version=2, finished=not is_back or bool(put),
                owed=[Owed(5, "u5")] * is_back,
            )  # fmt: skip

    events = play(sampler, Folder(journal, committed=range(12), again=[5]), Back())
    assert journal.of("put") == [("put", [5])]
    assert [e["when"] for e in events.of("eval")] == ["after"]


def test_a_group_that_was_under_way_when_training_seemed_over_is_sampled_all_the_same():
    journal = Journal()

    class Held(Sampler):
        """Has no answer for prompt 109 before it is asked again."""

        async def sample(self, given, draft, how, *, seed, homes):
            if given[-1] == 109 and credits.looks < 30:
                await asyncio.sleep(60)
            return await super().sample(given, draft, how, seed=seed, homes=homes)

    class Back:
        """Says that it has finished, is started again, and lacks group 9."""

        looks = 0

        def latest(self):
            self.looks += 1
            is_whole = sum(len(guids) for _, guids in journal.of("put")) == 4
            sampler.now = STEPS if is_whole else 2
            return Credit(step=2, policy_version=2, finished=20 < self.looks < 30 or is_whole)

    sampler, credits = Held(2, journal), Back()
    play(sampler, Folder(journal, committed=range(8)), credits)
    assert journal.of("put")[-1] == ("put", [9])


async def test_groups_that_do_not_heed_their_end_hold_up_nobody_and_are_not_asked_for_twice(
    monkeypatch,
):
    monkeypatch.setattr(loop_module, "BREAK_OFF_S", 0.05)

    async def deaf():
        with suppress(asyncio.CancelledError):
            await heard.wait()
        await heard.wait()

    heard = asyncio.Event()
    owed, stays = deque([9]), asyncio.create_task(deaf())
    running = {stays: 3}
    running |= {asyncio.create_task(asyncio.sleep(60)): guid for guid in (7, 5)}
    await asyncio.sleep(0)
    await asyncio.wait_for(loop_module._break_off(running, owed), 10)
    heard.set()
    await stays
    assert (owed, list(running.values())) == (deque([5, 7, 9]), [3])


async def test_a_group_that_is_finished_when_the_rest_is_broken_off_is_kept():
    owed, whole = deque([9]), asyncio.create_task(asyncio.sleep(0, "a group"))
    await whole
    running = {whole: 3, asyncio.create_task(asyncio.sleep(60)): 7}
    await loop_module._break_off(running, owed)
    assert owed == deque([7, 9])
    assert running == {whole: 3} and whole.result() == "a group"


async def cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def exits():
    sys.exit(0)


def episodes_of(rollout):
    environment = SimpleNamespace(rollout=rollout)
    made = episode_fakes.episodes(config(), Sampler(0, Journal()), lambda *_: 1.0, environment)
    return made, Prompt(0, [1], "", where="p.jsonl:7")


@pytest.mark.parametrize(
    ("ends", "said"), [(cancels_itself, "cancelled itself"), (exits, r"called sys\.exit\(0\)")]
)
async def test_an_episode_that_ends_its_task_is_an_error_and_no_end_of_the_run(ends, said):
    made, prompt = episodes_of(lambda *_: ends())

    with pytest.raises(RelaxError, match=rf"^p\.jsonl:7: an episode of the environment {said}$"):
        await made.run(prompt, [EpisodeRecord()], made.how(1.0), 0, [0])


def test_what_engines_say_of_a_request_comes_with_its_prompt_and_of_what_kind_it_is():
    """A group of errors was all that the status showed, and final ones were tried again."""

    async def asks(prompt, session):
        raise EngineUnfitError("http://x: HTTP 500: boom")

    made, prompt = episodes_of(asks)
    records = [EpisodeRecord(), EpisodeRecord()]
    with pytest.raises(EngineUnfitError, match=r"^p\.jsonl:7, group 31: http://x: HTTP 500: boom$"):
        asyncio.run(made.run(prompt, records, made.how(1.0), 31, [0, 1]))


@pytest.mark.parametrize(("masks_errors", "mean"), [(True, 1.0), (False, 0.5)])
def test_a_reward_that_failed_is_in_the_mean_of_a_shard_unless_it_is_masked(masks_errors, mean):
    rows = [row(5, 0, reward=1.0), row(5, 1)._replace(reward_error=True)]
    events = Events()
    publish(Folder(Journal()), [PromptGroup(5, rows)], events, masks_errors=masks_errors)
    publish(Folder(Journal()), [PromptGroup(6, rows[1:])], events, masks_errors=masks_errors)
    first, second = events.of("shard")
    assert first["reward/mean"] == mean
    assert second.get("reward/mean") == (None if masks_errors else 0.0)
    assert [first["num_episodes"], second["num_episodes"]] == [2, 1]


def test_the_event_of_a_shard_says_what_is_in_it():
    journal, events = Journal(), Events()
    groups = [
        PromptGroup(8, [row(8, 0, reward=1.0, version=3), row(8, 1, reward=0.0, version=5)]),
        PromptGroup(6, [row(6, 0, response=1, reward=1.0, version=4), row(6, 1, reward=1.0)]),
    ]
    publish(Folder(journal), groups, events)
    assert journal == [("put", [8, 6])]
    [shard] = events.of("shard")
    assert shard.pop("seconds") >= 0.0
    assert [shard] == [
        {
            "first_guid": 6, "num_groups": 2, "num_episodes": 4, "num_trajectories": 4,
            "num_tokens": 5 + 5 + 3 + 5, "counts": {},
            "policy_version_min": 0, "policy_version_max": 5, "reward/mean": 0.75,
        }
    ]  # fmt: skip


P, NUM_STEPS = 4, 2


def job(max_staleness=0, num_steps=NUM_STEPS):
    schedule = {"num_steps": num_steps, "prompts_per_step": P, "max_staleness": max_staleness}
    return config(schedule=schedule, algorithm__groups__name="as_sampled")


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


class Ready:
    now = None

    async def version(self):
        return self.now

    async def sample(self, given, draft, how, *, seed, homes):
        return answer(draft, [1], [-0.5], [(0, self.now)])


class Bus(episode_fakes.Folder):
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
    said, events, sampler = [], Events(), Ready()
    monkeypatch.setattr(
        loop.heartbeat, "say", lambda what: None if said[-1:] == [what] else said.append(what)
    )

    class Credits:
        credit = Credit()

        def latest(self):
            if (found := script.pop(said[-1] if said else "", None)) is not None:
                self.credit, sampler.now = found
            return self.credit

    prompts = [Prompt(index=i, token_ids=[7], answer="1") for i in range(P * NUM_STEPS)]
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
    said, events = follow(script, monkeypatch, Bus())
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
    said, _ = follow(script, monkeypatch, Bus(refuses=1), is_announced=True)
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
