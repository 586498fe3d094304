"""The rollout loop: how far it runs ahead, when it publishes, and when the bus says no."""

import asyncio
import errno
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import episode_fakes
import numpy as np
import pytest
from bus_fixtures import group as prompt_group
from episode_fakes import Folder, answer
from roles import role_fakes
from roles.role_fakes import Events

from relax_hpc.bus import durable, layout
from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import Credit, CreditTail
from relax_hpc.bus.durable import BusFullError
from relax_hpc.bus.log import RecordKind, read_log
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.staleness import mask_over_age
from relax_hpc.data.source import Prompt
from relax_hpc.inference.members import Member, Roster, RosterEntry
from relax_hpc.inference.pool_client import engine_state
from relax_hpc.roles.rollout import loop as rollout
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.runtime.paths import BusPaths, RunPaths
from relax_hpc.schema import PromptGroup, Trajectory

PROMPTS, SIBLINGS = 4, 2


class Sampler:
    """Answers every prompt with one token of the first policy."""

    async def version(self):
        return 0

    async def sample(self, given, draft, how, *, seed, homes):
        assert (how.min_version, list(given)) == (0, [7])
        return answer(draft, [1], [-0.5], [(0, 0)])


def config():
    schedule = {"num_steps": 1, "prompts_per_step": PROMPTS}
    return role_fakes.config(rollout__advanced__groups_per_shard=1, schedule=schedule)


@contextmanager
def trained(tmp_path, patch=lambda folders: None):
    """Paths, and the trainer, of a run whose loop goes on until the trainer has finished."""
    paths = BusPaths(tmp_path / "bus")
    layout.create(paths, ["rollout-0"], {})
    prompts = [Prompt(index=i, token_ids=[7], answer="1") for i in range(PROMPTS)]
    with (
        Folders.open(paths, 0, 1, {}) as folders,
        Sequencer(paths, prompts_per_step=PROMPTS, position=None) as sequencer,
    ):
        patch(folders)
        arguments = (prompts, (), Sampler(), lambda response, prompt: 1.0, folders)
        loop = episode_fakes.run(config(), *arguments, CreditTail(paths), Events())
        thread = threading.Thread(target=asyncio.run, args=(loop,), daemon=True)
        thread.start()
        yield paths, sequencer
        sequencer.finish()
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_groups_that_the_trainer_will_not_use_are_sampled_again(tmp_path):
    with trained(tmp_path) as (paths, sequencer):
        deadline = time.monotonic() + 20
        while audit(paths).committed < PROMPTS * SIBLINGS:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        paths.shard("rollout-0", 1, 0).write_bytes(b"")
        lost = next(r.rows for r in read_log(paths.log("rollout-0")) if r.kind is RecordKind.BASE)
        record = sequencer.next_portion(1, timeout_s=20)
    rows = Reader(paths).rows(record, range(PROMPTS * SIBLINGS))
    assert sorted({row.guid for row in rows}) == [0, 1, 2, 3]
    counts = audit(paths)
    assert (counts.planned, counts.damaged, counts.dropped) == (8, lost, 0)
    assert counts.committed == 8 + lost


def no_space():
    return BusFullError(Path("shard"), OSError(errno.ENOSPC, "no space left"))


def test_a_full_file_system_stops_new_samples_and_loses_none(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(durable, "FULL_RETRY_S", 0.2)
    refused = []

    def refuse_thrice(folders):
        real = folders.put

        def put(groups):
            if len(refused) < 3:
                refused.append(time.monotonic())
                raise no_space()
            return real(groups)

        monkeypatch.setattr(folders, "put", put)

    with trained(tmp_path, refuse_thrice) as (paths, sequencer):
        record = sequencer.next_portion(1, timeout_s=20)
    assert record.guids == [0, 1, 2, 3]
    assert refused[1] - refused[0] >= 0.2  # not hammered
    [line] = [line for line in caplog.messages if "no space" in line]
    assert line.startswith("shard (owner ") and "nothing is lost: make room" in line
    assert audit(paths)[:5] == (PROMPTS * SIBLINGS, PROMPTS * SIBLINGS, 0, 0, 0)


def test_a_folder_for_which_there_was_no_room_is_tried_again_and_the_others_are_not(
    tmp_path, monkeypatch
):
    paths = RunPaths(tmp_path).bus
    layout.create(paths, ["rollout-0", "rollout-1"], {})
    with Producer(paths, "rollout-1", {}) as producer:
        producer.put([prompt_group(5)])
    layout.deal(paths, ["rollout-0"])
    with Folders.open(paths, 0, 1, {}) as folders:
        outbox = rollout.Outbox(folders, Events(), config())
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


def test_nothing_new_is_started_while_finished_groups_find_no_space(monkeypatch):
    space, now = [], 100.0

    def publish(producer, groups, events, *, masks_errors):
        if not space:
            raise no_space()

    monkeypatch.setattr(rollout, "publish", publish)
    monkeypatch.setattr(durable.time, "monotonic", lambda: now)
    outbox = rollout.Outbox(episode_fakes.Folder(), Events(), config())
    assert not outbox.full
    outbox.send(rest=True)
    assert not outbox.full  # there was nothing to send
    outbox.add([PromptGroup(0, [])])
    outbox.send(rest=False)
    assert outbox.full
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
        (member("STARTING"), roster(), True, "lost"),
        (member("GONE"), roster(), True, "lost"),
        (member("FAILED"), None, True, "lost"),
    ],
)
def test_only_an_engine_whose_records_agree_on_the_newest_policy_is_sent_requests(
    record, known, own, expected
):
    assert engine_state(record, known, own=own) == expected


def aged(version_runs, loss_mask):
    made = role_fakes.row(prompt=2, response=len(loss_mask) - 2, mask=loss_mask)
    return made._replace(version_runs=np.array(version_runs, np.int32).reshape(-1, 2))


# tokens 0-1 given; 2-4 by policy 5, of which 3 is a tool's; 5-6 by policy 6, 7 by policy 7
RUNS, MASK = [(2, 5), (5, 6), (7, 7)], [0, 0, 1, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("step", "max_staleness", "expected"),
    [
        (8, 2, [0, 0, 1, 0, 1, 1, 1, 1]),  # 8 - 1 - 5 = 2: just young enough
        (8, 1, [0, 0, 0, 0, 0, 1, 1, 1]),
        (9, 2, [0, 0, 0, 0, 0, 1, 1, 1]),
        (8, 0, [0, 0, 0, 0, 0, 0, 0, 1]),  # on-policy: only what policy 7 sampled
        (20, 2, [0] * 8),
    ],
)
def test_tokens_of_policies_beyond_the_bound_leave_the_loss(step, max_staleness, expected):
    masked = mask_over_age(aged(RUNS, MASK), step=step, max_staleness=max_staleness)
    assert masked.loss_mask.tolist() == expected


def test_only_the_mask_changes_and_only_in_a_copy():
    before = aged(RUNS, MASK)
    masked = mask_over_age(before, step=8, max_staleness=0)
    assert before.loss_mask.tolist() == MASK
    for name in Trajectory._fields:
        assert name == "loss_mask" or getattr(masked, name) is getattr(before, name)


def test_a_policy_that_samples_again_after_a_restart_is_judged_by_its_run():
    """An engine that was given older weights: the last run is older than the one before."""
    masked = mask_over_age(aged([(2, 7), (5, 4)], MASK), step=8, max_staleness=1)
    assert masked.loss_mask.tolist() == [0, 0, 1, 0, 1, 0, 0, 0]
