"""The rollout loop and its shards' events: what exactly is asked of whom."""

import asyncio
import itertools
import sys
from collections import deque
from contextlib import suppress
from types import SimpleNamespace

import episode_fakes
import numpy as np
import pytest
from episode_fakes import answer
from role_fakes import Events, Journal, config, row

from relax_hpc.bus.credits import Credit, Owed
from relax_hpc.bus.layout import Deal, Deals
from relax_hpc.data.source import Prompt
from relax_hpc.environments.record import EpisodeRecord
from relax_hpc.errors import EngineUnfitError, RelaxError
from relax_hpc.inference.generation import Sampling
from relax_hpc.roles.rollout import loop as loop_module
from relax_hpc.roles.rollout.episodes import seed_of
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.roles.rollout.loop import publish
from relax_hpc.schema import MediaKind, Medium, PromptGroup

STEPS = 3


def owned_below(end, rank, size, committed, start):
    folder = SimpleNamespace(committed=committed)
    guids = Folders(Deals([Deal(0, size)]), rank, {rank: folder}).list_owed(start=start)
    return list(itertools.takewhile(lambda guid: guid < end, guids))


@pytest.mark.parametrize(
    ("start", "rank", "owned"),
    [
        (0, 0, [0, 2, 4, 6, 8]),
        (0, 1, [1, 3, 5, 7, 9]),
        (3, 0, [4, 6, 8]),
        (3, 1, [3, 5, 7, 9]),
        (4, 0, [4, 6, 8]),
        (4, 1, [5, 7, 9]),
    ],
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


def run(*, version=2, committed=(), again=(), credit=None, count=4, rank=1, **settings):
    journal, events = Journal(), Events()
    made = config(
        seed=3, schedule__num_steps=STEPS, schedule__prompts_per_step=4, schedule__max_staleness=1,
        engines__rollout__count=2, rollout__temperature=0.6, rollout__advanced__groups_per_shard=1,
        algorithm__groups__name="as_sampled", **settings
    )  # fmt: skip
    prompts = [Prompt(index=i, token_ids=[7, 100 + i], answer=str(i)) for i in range(12)]
    sampler = Sampler(version, journal)
    arguments = (prompts, [Prompt(1, [9], "h")], sampler, lambda *_: 1.0)
    credit = credit or Credit(step=version, policy_version=version)
    credits = Credits(sampler, count, credit)
    folder = Folder(journal, committed, again, task=rank, size=2)
    loop = episode_fakes.run(made, *arguments, folder, credits, events)
    asyncio.run(asyncio.wait_for(loop, 20))
    return journal, events


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
    assert asked(journal) == [7, 5, 3, 9, 11]


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

    made = config(
        schedule__num_steps=STEPS, schedule__prompts_per_step=4, schedule__max_staleness=1,
        engines__rollout__count=2, rollout__advanced__groups_per_shard=1,
        algorithm__groups__name="as_sampled",
    )  # fmt: skip
    prompts = [Prompt(index=i, token_ids=[7, 100 + i], answer=str(i)) for i in range(12)]
    folder = Folder(journal, again=[7, 5], task=1, size=2)
    loop = episode_fakes.run(
        made, prompts, [Prompt(1, [9], "h")], sampler, lambda *_: 1.0, folder, Later(), Events()
    )
    asyncio.run(asyncio.wait_for(loop, 20))
    assert asked(journal) == [1, 3, 5, 7, 7, 5]


def test_a_task_that_starts_late_begins_where_nothing_is_retired_and_deletes_what_is():
    credit = Credit(step=2, policy_version=2, retired_guid_below=6)
    journal, _ = run(credit=credit, count=3)
    assert asked(journal) == [7, 9, 11]
    assert set(journal.of("collect")) == {("collect", 6)}


def test_the_first_policy_and_the_last_are_evaluated_and_no_other():
    journal, events = run(version=0, credit=Credit(), count=4)
    assert [e["when"] for e in events.of("eval")] == ["before", "after"]
    journal, events = run(version=3, credit=Credit(step=3, policy_version=3), count=6)
    assert [(e["when"], e["version"]) for e in events.of("eval")] == [("after", 3)]
    assert journal[-1][1] == [9] and journal[-1][3] == Sampling(0.0, 256, max_tokens=1 << 20)


def test_a_start_that_finds_training_over_waits_for_the_last_policy_and_evaluates_it_once():
    journal, events = Journal(), Events()

    class Late(Sampler):
        """An engine of which the trainer hears only after a while."""

        async def version(self):
            self.journal.note("version")
            return STEPS if len(self.journal.of("version")) > 5 else None

    class Over:
        """The trainer before had finished; the one of now has to give engines the last policy."""

        def latest(self):
            return Credit(step=STEPS, policy_version=STEPS, finished=True)

    made = config(schedule__num_steps=STEPS)
    loop = episode_fakes.run(
        made, [], [Prompt(0, [9], "h")], Late(STEPS, journal), lambda *_: 1.0,
        Folder(journal), Over(), events,
    )  # fmt: skip
    asyncio.run(asyncio.wait_for(loop, 20))
    assert [(e["when"], e["version"]) for e in events.of("eval")] == [("after", STEPS)]
    assert [given for _, given, *_ in journal.of("sample")] == [[9]]


def test_a_task_goes_on_if_a_trainer_comes_back_that_has_lost_the_last_step():
    journal, events = Journal(), Events()
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

    made = config(
        schedule__num_steps=STEPS, schedule__prompts_per_step=4, schedule__max_staleness=1,
        rollout__advanced__groups_per_shard=1,
    )  # fmt: skip
    prompts = [Prompt(index=i, token_ids=[7, 100 + i], answer=str(i)) for i in range(12)]
    folder = Folder(journal, committed=range(12), again=[5])
    loop = episode_fakes.run(
        made, prompts, [Prompt(0, [9], "h")], sampler, lambda *_: 1.0,
        folder, Back(), events,
    )  # fmt: skip
    asyncio.run(asyncio.wait_for(loop, 20))
    assert journal.of("put") == [("put", [5])]
    assert [e["when"] for e in events.of("eval")] == ["after"]


def test_a_group_that_was_under_way_when_training_seemed_over_is_sampled_all_the_same():
    journal, events = Journal(), Events()

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

    made = config(
        schedule__num_steps=STEPS, schedule__prompts_per_step=4, schedule__max_staleness=1,
        rollout__advanced__groups_per_shard=1,
    )  # fmt: skip
    prompts = [Prompt(index=i, token_ids=[7, 100 + i], answer=str(i)) for i in range(12)]
    sampler, credits = Held(2, journal), Back()
    loop = episode_fakes.run(
        made, prompts, [Prompt(0, [9], "h")], sampler, lambda *_: 1.0,
        Folder(journal, committed=range(8)), credits, events,
    )  # fmt: skip
    asyncio.run(asyncio.wait_for(loop, 20))
    assert journal.of("put")[-1] == ("put", [9])


def test_groups_that_do_not_heed_their_end_hold_up_nobody_and_are_not_asked_for_twice(monkeypatch):
    monkeypatch.setattr(loop_module, "BREAK_OFF_S", 0.05)

    async def deaf():
        with suppress(asyncio.CancelledError):
            await heard.wait()
        await heard.wait()

    async def run():
        owed, stays = deque([9]), asyncio.create_task(deaf())
        running = {stays: 3}
        running |= {asyncio.create_task(asyncio.sleep(60)): guid for guid in (7, 5)}
        await asyncio.sleep(0)
        await asyncio.wait_for(loop_module._break_off(running, owed), 10)
        heard.set()
        await stays
        return owed, list(running.values())

    heard = asyncio.Event()
    assert asyncio.run(run()) == (deque([5, 7, 9]), [3])


def test_a_group_that_is_finished_when_the_rest_is_broken_off_is_kept():
    async def run():
        owed, whole = deque([9]), asyncio.create_task(asyncio.sleep(0, "a group"))
        await whole
        running = {whole: 3, asyncio.create_task(asyncio.sleep(60)): 7}
        await loop_module._break_off(running, owed)
        return owed, running, whole

    owed, running, whole = asyncio.run(run())
    assert owed == deque([7, 9])
    assert running == {whole: 3} and whole.result() == "a group"


async def cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def exits():
    sys.exit(0)


@pytest.mark.parametrize(
    ("ends", "said"), [(cancels_itself, "cancelled itself"), (exits, r"called sys\.exit\(0\)")]
)
def test_an_episode_that_ends_its_task_is_an_error_and_no_end_of_the_run(ends, said):
    environment = SimpleNamespace(rollout=lambda *_: ends())
    made = episode_fakes.episodes(config(), Sampler(0, Journal()), lambda *_: 1.0, environment)
    prompt = Prompt(0, [1], "", where="p.jsonl:7")

    async def run():
        await made.run(prompt, [EpisodeRecord()], made.how(1.0), 0, [0])

    with pytest.raises(RelaxError, match=rf"^p\.jsonl:7: an episode of the environment {said}$"):
        asyncio.run(run())


def test_what_engines_say_of_a_request_comes_with_its_prompt_and_of_what_kind_it_is():
    """A group of errors was all that the status showed, and final ones were tried again."""

    async def asks(prompt, session):
        raise EngineUnfitError("http://x: HTTP 500: boom")

    environment = SimpleNamespace(rollout=asks)
    made = episode_fakes.episodes(config(), Sampler(0, Journal()), lambda *_: 1.0, environment)
    prompt = Prompt(0, [1], "", where="p.jsonl:7")
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


def test_the_event_of_a_shard_counts_media_once_and_tokens_of_every_row():
    shown = Medium(MediaKind.PNG, np.zeros(700, np.uint8), (1, 4, 4), b"a" * 16)
    other = Medium(MediaKind.WAV, np.zeros(90, np.uint8), canonical_xxh3=b"b" * 16)
    spans = np.array([[0, 0, 2], [1, 2, 1]], np.int32)
    rows = [row(5, n)._replace(media=(shown, other), media_spans=spans) for n in range(2)]
    rows.append(row(5, 2)._replace(media=(shown,), media_spans=spans[:1]))
    journal, events = Journal(), Events()
    publish(Folder(journal), [PromptGroup(5, rows)], events)
    [shard] = events.of("shard")
    found = {key: shard[key] for key in shard if "media/" in key}
    assert found == {
        "rollout/media/number": 2, "rollout/media/bytes": 790, "rollout/media/tokens": 3 + 3 + 2,
    }  # fmt: skip


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
