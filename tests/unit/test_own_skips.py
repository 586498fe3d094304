"""The rollout loop: how far it runs ahead, what it skips, when it publishes, and a full bus."""

import asyncio
import errno
import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import episode_fakes
import numpy as np
import pytest
from bus_fixtures import PRODUCERS, SIBLINGS, group, make_bus, whole_batch
from bus_fixtures import group as prompt_group
from episode_fakes import Folder
from roles import role_fakes
from roles.role_fakes import Events

from relax_hpc.bus import durable, layout
from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import Credit, CreditTail
from relax_hpc.bus.durable import BusFullError
from relax_hpc.bus.plan import read_chain
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.skips import SkippedGuids
from relax_hpc.bus.staleness import mask_over_age
from relax_hpc.data.source import Prompt
from relax_hpc.inference.members import Member, Roster, RosterEntry
from relax_hpc.inference.pool_client import engine_state
from relax_hpc.roles.dealing.portions import judge_of, most_skipped
from relax_hpc.roles.rollout import loop as rollout
from relax_hpc.roles.rollout import skips as skips_module
from relax_hpc.roles.rollout.episodes import Grouper, seed_of
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.roles.rollout.heldout import Evaluator
from relax_hpc.roles.rollout.pace import Pace
from relax_hpc.roles.rollout.skips import TaskSkips, exchange_of
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.schema import PromptGroup

P = 4


def config(lag=1, **settings):
    return role_fakes.config(
        schedule__num_steps=99, schedule__prompts_per_step=P, schedule__max_staleness=lag,
        rollout__samples_per_prompt=SIBLINGS, algorithm__groups__name="refill", **settings,
    )  # fmt: skip


def sampled(guid, *, flat, version=0):
    """A group of equal rewards, or of different ones."""
    return group(guid, version=version, reward=1.0 if flat else None)


def ends(credit, skipped, lag=1):
    pace = Pace(config(lag))
    pace.follow(credit, skipped)
    return [min(g for g in range(99) if pace.batch_of(g) > b) for b in range(1, lag + 3)]


def test_own_skips_move_the_ends_of_batches_that_the_trainer_says():
    # 0 . . 3 4 5 | 6 7 8 9 | 10 ..
    assert ends(Credit(), [1, 2]) == [6, 10, 14]
    # 0 . . 3 4 . 6 | 7 8 9 . 11
    assert ends(Credit(), [1, 2, 5, 10]) == [7, 12, 16]
    told = Credit(batch_ends=(6, 13, 17))  # it knows of two in batch 1, of three in batch 2
    assert ends(told, []) == [6, 13, 17]
    assert ends(told, [4, 6, 20]) == [8, 15, 19]
    late = Credit(step=2, policy_version=2, batch_ends=(17, 21, 25))
    pace = Pace(config())
    pace.follow(late, [15, 17, 24])
    assert [pace.batch_of(g) for g in (16, 18, 19, 22, 23, 24)] == [3, 3, 4, 4, 5, 5]


def test_an_end_is_never_further_away_than_by_all_skips_and_as_far_if_all_are_own():
    for seed in range(300):
        dice = random.Random(seed)
        all_of_them = sorted(dice.sample(range(24), dice.randrange(16)))
        own = [guid for guid in all_of_them if dice.random() < 0.5]
        known = SkippedGuids(above=set(all_of_them) - set(own))
        both = SkippedGuids(above=all_of_them).batch_ends(1, 3, P) or [4, 8, 12]
        here = ends(Credit(batch_ends=tuple(known.batch_ends(1, 3, P))), own)
        assert all(mine <= theirs for mine, theirs in zip(here, both, strict=True)), seed
        assert ends(Credit(), all_of_them) == both, seed


def test_a_trainer_has_seen_what_is_before_its_place_or_retired_and_nothing_of_unknown_producers():
    told = Credit(seen=(2, 9), retired_guid_below=8)
    places = ((0, 1), (0, 2), (1, 8), (2, 0), None)
    assert [told.covers(8, place) for place in places] == [1, 0, 1, 0, 0]
    assert [told.covers(7, place) for place in places] == [1, 1, 1, 1, 1]


def test_they_are_own_from_the_moment_they_are_finished_until_the_trainer_has_seen_them(tmp_path):
    paths, made = make_bus(tmp_path), config()
    credits = CreditTail(paths)
    with Folders.open(paths, 0, len(PRODUCERS), {}) as folders:
        skips = TaskSkips(made, folders)
        groups = [sampled(guid, flat=guid in (2, 6)) for guid in (0, 2, 4, 6)]
        skips.judge(groups[:2])
        assert skips.unknown_to(None) == [2]
        folders.put(groups[:2])
        with Sequencer(
            paths, prompts_per_step=P, position=None, max_staleness=1, judge=judge_of(made)
        ) as trainer:
            assert credits.latest().seen == ()
            assert skips.unknown_to(credits.latest()) == [], "whether it knows cannot be told"
            trainer.look()
            assert credits.latest().seen == (1, 0)
            assert skips.unknown_to(credits.latest()) == []
            assert credits.latest().batch_ends[:1] == (5,)
            skips.judge(groups[2:])
            assert skips.unknown_to(credits.latest()) == [6]
            folders.put(groups[2:])
            assert skips.unknown_to(credits.latest()) == [6]
            trainer.look()
            assert credits.latest().batch_ends[:1] == (5,), "1, 3 are of the other task"
            assert skips.unknown_to(credits.latest()) == []
        skips.judge([sampled(8, flat=True)])
        assert skips.unknown_to(credits.latest()) == [8]
        skips.take_back([8])  # its shard was damaged
        assert skips.unknown_to(credits.latest()) == []
        skips.judge([sampled(8, flat=True)])
        assert skips.unknown_to(credits.latest()._replace(retired_guid_below=9)) == []


def test_without_a_trainer_no_more_are_replaced_than_it_would_let_pass():
    made = config(lag=0)
    skips, pace = TaskSkips(made, None), Pace(made)
    for guid in range(999):
        pace.follow(Credit(), skips.unknown_to(None))
        if pace.wait_reason(guid, 0):
            break
        skips.judge([sampled(guid, flat=True)])
    assert guid == most_skipped(made) + P == 44


def test_tasks_that_have_nothing_to_do_tell_each_other_what_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(skips_module, "EXCHANGE_EVERY_S", 0.0)
    made = config(launch__layout="separate", weights__transport="files")
    run, paths = RunPaths(tmp_path / "run"), make_bus(tmp_path)
    with ExitStack() as opened:
        folders = [opened.enter_context(Folders.open(paths, n, 2, {})) for n in (0, 1)]
        tasks = [TaskSkips(made, f, exchange_of(made, run, n, 2)) for n, f in enumerate(folders)]
        tasks[0].judge([sampled(0, flat=True), sampled(2, flat=False)])
        tasks[1].judge([sampled(1, flat=True)])
        for task in tasks:
            task.note(idle=True)
        assert [task.unknown_to(None) for task in tasks] == [[0], [1]], "none is committed"
        folders[0].put([sampled(0, flat=True)])
        folders[1].put([sampled(1, flat=True)])
        for task in (*tasks, *tasks):
            task.note(idle=False)
        assert [task.unknown_to(None) for task in tasks] == [[0], [1]]
        for task in (*tasks, tasks[0]):
            task.note(idle=True)
        assert [task.unknown_to(None) for task in tasks] == [[0, 1], [0, 1]]
        assert read_json(run.skips(1)) == {"skips": [[1, 1, 0]]}
        half = Credit(seen=(1, 0))
        assert [task.unknown_to(half) for task in tasks] == [[1], [1]]
        assert [task.unknown_to(Credit(seen=(1, 1))) for task in tasks] == [[], []]
        assert [task.unknown_to(Credit()) for task in tasks] == [[], []]


# groups begun early, for the places of groups that will probably be skipped

STEPS, FLAT = 8, 3
"""Of every five groups, FLAT have no spread."""


class Engines:
    """Sample two tokens, each with the policy of its moment; responses take 1 to 40 ms."""

    def __init__(self):
        self.now, self.asked = 0, Counter()

    async def version(self):
        return self.now

    async def sample(self, given, draft, how, *, seed, homes):
        sibling = seed != seed_of(0, homes[1], 0)
        self.asked[homes[1]] += not sibling and not draft.token_ids
        while len(draft.token_ids) < 2:
            await asyncio.sleep(random.Random(seed).choice((0.001, 0.01, 0.02)))
            answer = episode_fakes.answer
            found = answer(draft, [int(sibling)], [-0.5], [(len(draft.token_ids), self.now)])
        return found


class Asked:
    async def fetch(self, guid):
        return Prompt(guid, [7], str(int(random.Random(guid // 5).sample(range(5), 5)[guid % 5])))


def train(made, paths, engines):
    lag = made.schedule.max_staleness
    with Sequencer(
        paths, prompts_per_step=P, position=None, max_staleness=lag, judge=judge_of(made)
    ) as trainer:
        for step in range(1, STEPS + 1):
            whole_batch(trainer, step, timeout_s=20)
            engines.now = step
            trainer.advance(step=step, policy_version=step)
        trainer.finish()


async def sample(made, paths, engines, events):
    tasks = made.rollout_pool.num_hosts
    parts = episode_fakes.episodes(
        made, engines, lambda r, s: 1.0 if int(s.answer) < FLAT else float(r[0])
    )
    with ExitStack() as opened:
        for number in range(tasks):
            folders = opened.enter_context(Folders.open(paths, number, tasks, {}))
            evaluator = Evaluator(made, {"heldout": []}, parts, Events(), episode_fakes.Board())
            loop = rollout.run(
                made, engines, Grouper(made, Asked(), parts), evaluator, folders,
                CreditTail(paths), events, episode_fakes.NoEnd(), TaskSkips(made, folders),
            )  # fmt: skip
            opened.callback(asyncio.create_task(loop).cancel)
        await asyncio.to_thread(train, made, paths, engines)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("tasks", [1, 2])
def test_groups_begun_early_change_neither_batches_nor_lag(tmp_path, tasks, lag):
    made = config(lag, engines__rollout__count=tasks, run_root=tmp_path)
    paths, engines, events = RunPaths(tmp_path).bus, Engines(), Events()
    layout.create(paths, [f"rollout-{n}" for n in range(tasks)], {})
    asyncio.run(asyncio.wait_for(sample(made, paths, engines, events), 60))
    steps = read_chain(paths).steps
    answers = [asyncio.run(Asked().fetch(guid)).answer for guid in range(200)]
    teaching = [guid for guid in range(200) if int(answers[guid]) >= FLAT]
    assert [guid for step in steps for guid in step.guids] == teaching[: P * STEPS]
    assert all(step.policy_version_min >= step.step - 1 - lag for step in steps)
    counts = audit(paths)
    assert (counts.dropped, counts.duplicates, counts.over_age) == (0, 0, 0)
    early = sum(event.get("groups/early", 0) for event in events.of("waits"))
    surplus = sum(event.get("groups/surplus", 0) for event in events.of("waits"))
    again = sum(engines.asked.values()) - len(engines.asked)
    assert lag or (early > STEPS and again >= surplus > 0)


PROMPTS = 4
CONFIG = role_fakes.config(
    rollout__advanced__groups_per_shard=1, schedule={"num_steps": 1, "prompts_per_step": PROMPTS}
)


def no_space():
    return BusFullError(Path("shard"), OSError(errno.ENOSPC, "no space left"))


def test_a_folder_for_which_there_was_no_room_is_tried_again_and_the_others_are_not(
    tmp_path, monkeypatch
):
    paths = RunPaths(tmp_path).bus
    layout.create(paths, ["rollout-0", "rollout-1"], {})
    with Producer(paths, "rollout-1", {}) as producer:
        producer.put([prompt_group(5)])
    layout.deal(paths, ["rollout-0"])
    with Folders.open(paths, 0, 1, {}) as folders:
        outbox = rollout.Outbox(folders, Events(), CONFIG)
        put = Producer.put

        def full(self, groups):
            if self.name == "rollout-1":
                raise no_space()
            return put(self, groups)

        outbox.add([prompt_group(0), prompt_group(1), prompt_group(3)])
        with monkeypatch.context() as patched:
            patched.setattr(Producer, "put", full)
            outbox.send(rest=True)
        assert outbox.guids == [1, 3] and folders.committed == {0, 5}
        outbox._space = durable.Space()  # there is room again
        outbox.send(rest=True)
        assert outbox.guids == [] and folders.committed == {0, 1, 3, 5}


def test_nothing_new_is_started_while_finished_groups_find_no_space(monkeypatch, caplog):
    space, now = [], 100.0

    def publish(producer, groups, events, *, masks_errors):
        if not space:
            raise no_space()

    monkeypatch.setattr(rollout, "publish", publish)
    monkeypatch.setattr(durable.time, "monotonic", lambda: now)
    outbox = rollout.Outbox(episode_fakes.Folder(), Events(), CONFIG)
    assert not outbox.full
    outbox.send(rest=True)
    assert not outbox.full  # there was nothing to send
    outbox.add([PromptGroup(0, [])])
    outbox.send(rest=False)
    assert outbox.full
    [line] = [line for line in caplog.messages if "no space" in line]
    assert line.startswith("shard (owner ") and "nothing is lost: make room" in line
    space, now = ["again"], 104.9
    outbox.send(rest=True)
    assert outbox.full and outbox.guids == [0]  # it is too soon to try again
    now = 105.0
    outbox.send(rest=True)
    assert not outbox.full and outbox.guids == []


def pace(over_sampling=0.0, **schedule):
    over_age = "drop" if over_sampling else "wait"
    schedule = {"num_steps": 9, "prompts_per_step": PROMPTS, "over_age": over_age, **schedule}
    return rollout.Pace(
        role_fakes.config(rollout__advanced__over_sampling=over_sampling, schedule=schedule)
    )


def admitted(pace, version):
    return sum(pace.wait_reason(guid, version) is None for guid in range(100))


def test_groups_start_within_the_staleness_bound_and_with_over_sampling_so_many_more():
    # 4 prompts a step; with version 2 step 3 is next
    assert admitted(pace(max_staleness=0), 2) == 12
    assert admitted(pace(max_staleness=1), 2) == 16
    assert admitted(pace(over_sampling=0.5, max_staleness=0), 2) == 14
    assert admitted(pace(over_sampling=0.5, max_staleness=1), 2) == 18
    assert admitted(pace(max_staleness=1), None) == 0  # there is no engine


def told(pace, step, *ends):
    pace.follow(Credit(step=step, policy_version=step, batch_ends=ends))
    return pace


def test_what_is_skipped_moves_the_ends_of_batches():
    # 4 prompts a step; of the first 14 groups 5 were skipped: 2 of batch 1, 3 of batch 2
    bound = told(pace(max_staleness=0), 0, 6, 13)
    batches = [bound.batch_of(guid) for guid in range(22)]
    assert batches == [1] * 6 + [2] * 7 + [3] * 4 + [4] * 4 + [5]
    assert [admitted(bound, version) for version in (0, 1, 2, 3)] == [6, 13, 17, 21]
    assert admitted(told(pace(max_staleness=1), 0, 6, 13), 0) == 13
    bound = told(pace(max_staleness=0), 3, 21, 25)  # of the batches from the fourth on
    assert bound.batch_of(0) == 4 and bound.batch_of(21) == 5
    assert admitted(bound, 3) == 21 and admitted(bound, 4) == 25
    over = told(pace(over_sampling=0.5, max_staleness=0), 0, 6, 13)
    assert admitted(over, 0) == 8


def test_as_many_groups_are_started_as_the_run_will_train_on():
    assert admitted(pace(max_staleness=5), 9) == 36  # nine steps
    assert admitted(told(pace(max_staleness=5), 8, 41), 9) == 41


def test_no_policy_beyond_the_bound_samples_for_a_group():
    bound = pace(max_staleness=1)
    assert bound.min_version(4 * 5, 5) == 4  # batch 6 is trained by step 6, on top of policy 5
    assert bound.min_version(0, 0) == 0
    over = pace(over_sampling=0.5, max_staleness=0)
    assert over.min_version(13, 2) == 2  # batch 4 wants policy 3, which is not there yet


def test_a_batch_is_published_when_its_last_group_is_done_and_not_before():
    batches = pace()
    assert not batches.is_done(ready=[0, 1, 3], running=[2, 4, 5])
    assert batches.is_done(ready=[0, 1, 2, 3], running=[4, 5])
    assert not batches.is_done(ready=[0, 1, 2, 3, 5], running=[4])
    assert batches.is_done(ready=[0], running=[])


def test_a_finished_group_does_not_wait_long_for_others(monkeypatch):
    published = []
    monkeypatch.setattr(rollout, "publish", lambda producer, groups, **_: published.append(groups))
    outbox = rollout.Outbox(
        Folder(), Events(), role_fakes.config(rollout__advanced__groups_per_shard=3)
    )
    first, second = PromptGroup(0, []), PromptGroup(1, [])
    outbox.add([first])
    outbox.send(rest=False)
    assert published == [] and outbox.guids == [0]
    monkeypatch.setattr(rollout, "READY_S", -1.0)
    outbox.send(rest=False)
    assert published == [[first]] and outbox.guids == []
    outbox.send(rest=True)
    assert len(published) == 1  # nothing is no shard
    monkeypatch.setattr(rollout, "READY_S", 1e9)
    outbox.add([second])
    outbox.add([first])
    outbox.send(rest=False)
    assert len(published) == 1  # a shard is three
    outbox.add([second])
    outbox.send(rest=False)
    assert published[1:] == [[second, first, second]]


def member(state="HEALTHY", start="a"):
    return Member("extra-1", start, "http://x", 1, "embedded", state)


def roster(version=3, state="ACTIVE", start="a", at=3):
    return Roster(version, {"extra-1": RosterEntry(start, at, state)})


@pytest.mark.parametrize(
    ("record", "known", "own", "expected"),
    [
        (member(), None, True, "serving"),
        (member(), None, False, "held"),
        (member(), roster(), False, "serving"),
        (member(), roster(version=4), False, "held"),
        (member(), roster(state="SYNCING"), True, "held"),
        (member(), roster(state="FENCED", at=None), True, "lost"),
        (member(start="b"), roster(state="FENCED", at=None), True, "held"),
        (member(start="b"), roster(), True, "held"),
        (member(), Roster(3, {}), True, "held"),
        (member("DRAINING"), roster(), False, "held"),
        (member("GONE"), roster(), True, "lost"),
    ],
)
def test_only_an_engine_whose_records_agree_on_the_newest_policy_is_sent_requests(
    record, known, own, expected
):
    assert engine_state(record, known, own=own) == expected


# tokens 0-1 given; 2-4 by policy 5, of which 3 is a tool's; 5-6 by policy 6, 7 by policy 7
RUNS, MASK = [(2, 5), (5, 6), (7, 7)], [0, 0, 1, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("runs", "step", "max_staleness", "expected"),
    [
        (RUNS, 8, 2, [0, 0, 1, 0, 1, 1, 1, 1]),  # 8 - 1 - 5 = 2: just young enough
        (RUNS, 8, 1, [0, 0, 0, 0, 0, 1, 1, 1]),
        (RUNS, 9, 2, [0, 0, 0, 0, 0, 1, 1, 1]),
        (RUNS, 8, 0, [0, 0, 0, 0, 0, 0, 0, 1]),  # on-policy: only what policy 7 sampled
        # An engine that was given older weights: the last run is older than the one before.
        ([(2, 7), (5, 4)], 8, 1, [0, 0, 1, 0, 1, 0, 0, 0]),
    ],
)
def test_tokens_of_policies_beyond_the_bound_leave_the_loss_in_a_copy(
    runs, step, max_staleness, expected
):
    before = role_fakes.row(prompt=2, response=6, mask=MASK)
    before = before._replace(version_runs=np.array(runs, np.int32))
    masked = mask_over_age(before, step=step, max_staleness=max_staleness)
    assert masked.loss_mask.tolist() == expected and before.loss_mask.tolist() == MASK
