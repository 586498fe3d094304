"""The rollout loop when the bus says no, or wants something again."""

import asyncio
import errno
import threading
import time
from pathlib import Path

import episode_fakes
import numpy as np
from bus_fixtures import group as prompt_group
from episode_fakes import answer

from relax_hpc import job_file
from relax_hpc.bus import durable, layout
from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.durable import BusFullError
from relax_hpc.bus.log import RecordKind, read_log
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.paths import BusPaths, RunPaths
from relax_hpc.prompts.source import Prompt
from relax_hpc.roles.rollout import loop as rollout
from relax_hpc.roles.rollout.episodes import seed_of
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.schema import PromptGroup

PROMPTS, SIBLINGS = 4, 2
EXPERTS = np.arange(8, dtype=np.int16).reshape(2, 4)  # 2 tokens, 2 layers x 2 experts


class Sampler:
    """Answers every prompt with one token; the policy version is whatever the test says."""

    def __init__(self, version=0):
        self.now, self.asked = version, []

    async def version(self):
        return self.now

    async def sample(self, given, draft, how, *, seed, homes):
        self.asked.append((how.temperature, how.routed_experts))
        assert (how.min_version, list(given)) == (0, [7])
        experts = None
        if how.routed_experts:
            sibling = [seed_of(0, homes[1], each) for each in range(SIBLINGS)].index(seed)
            experts = EXPERTS + sibling
        return answer(draft, [1], [-0.5], [(0, self.now)], experts=experts)


class Events:
    def emit(self, event, **fields):
        pass


def config(**schedule):
    return job_file.validate(
        {
            "name": "test",
            "model": {"path": "none"},
            "prompts": {"train": "none"},
            "rollout": {"samples_per_prompt": SIBLINGS, "groups_per_shard": 1},
            "schedule": {"num_steps": 1, "prompts_per_step": PROMPTS, **schedule},
            "eval": {"heldout": {"path": "none", "every": 0}},
        },
        source="test",
    )


def start(paths, folders, sampler, settings, *, heldout=()):
    prompts = [Prompt(index=i, token_ids=[7], answer="1") for i in range(PROMPTS)]
    arguments = (prompts, heldout, sampler, lambda response, prompt: 1.0, folders)
    loop = episode_fakes.run(settings, *arguments, CreditTail(paths), Events())
    thread = threading.Thread(target=asyncio.run, args=(loop,), daemon=True)
    thread.start()
    return thread


def make_bus(tmp_path):
    paths = BusPaths(tmp_path / "bus")
    layout.create(paths, ["rollout-0"], {})
    return paths


def test_groups_that_the_trainer_will_not_use_are_sampled_again(tmp_path):
    paths, sampler = make_bus(tmp_path), Sampler()
    settings = config()
    with (
        Folders.open(paths, 0, 1, {}) as folders,
        Sequencer(paths, prompts_per_step=PROMPTS, position=None) as sequencer,
    ):
        thread = start(paths, folders, sampler, settings)
        deadline = time.monotonic() + 20
        while audit(paths).committed < PROMPTS * SIBLINGS:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        paths.shard("rollout-0", 1, 0).write_bytes(b"")
        lost = next(r.rows for r in read_log(paths.log("rollout-0")) if r.kind is RecordKind.BASE)
        record = sequencer.next_portion(1, timeout_s=20)
        sequencer.finish()
        thread.join(timeout=20)
        assert not thread.is_alive()
    rows = Reader(paths).rows(record, range(PROMPTS * SIBLINGS))
    assert sorted({row.guid for row in rows}) == [0, 1, 2, 3]
    counts = audit(paths)
    assert (counts.planned, counts.damaged, counts.dropped) == (8, lost, 0)
    assert counts.committed == 8 + lost


def test_routed_experts_reach_the_bus_and_are_asked_for_only_where_something_is_learnt(tmp_path):
    paths, sampler, settings = make_bus(tmp_path), Sampler(), config()
    wanted = settings.rollout.model_copy(update={"routed_experts": True})
    settings = settings.model_copy(update={"rollout": wanted})
    with (
        Folders.open(paths, 0, 1, {}) as folders,
        Sequencer(paths, prompts_per_step=PROMPTS, position=None) as sequencer,
    ):
        thread = start(paths, folders, sampler, settings, heldout=[Prompt(0, [7], "1")])
        record = sequencer.next_portion(1, timeout_s=20)
        sampler.now = 1
        sequencer.finish()
        thread.join(timeout=20)
        assert not thread.is_alive()
    for row in Reader(paths).rows(record, range(PROMPTS * SIBLINGS)):
        assert np.array_equal(row.routed_experts, EXPERTS + row.sibling)
    assert set(sampler.asked) == {(1.0, True), (0.0, False)}


def test_a_full_file_system_stops_new_samples_and_loses_none(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(durable, "FULL_RETRY_S", 0.2)
    paths, sampler = make_bus(tmp_path), Sampler()
    refused = []
    with Folders.open(paths, 0, 1, {}) as folders:
        real = folders.put

        def put(groups):
            if len(refused) < 3:
                refused.append((time.monotonic(), len(groups)))
                raise BusFullError(Path("shard"), OSError(errno.ENOSPC, "no space left"))
            return real(groups)

        monkeypatch.setattr(folders, "put", put)
        with Sequencer(paths, prompts_per_step=PROMPTS, position=None) as sequencer:
            thread = start(paths, folders, sampler, config())
            record = sequencer.next_portion(1, timeout_s=20)
            sequencer.finish()
            thread.join(timeout=20)
            assert not thread.is_alive()
    assert record.guids == [0, 1, 2, 3]
    times = [when for when, _ in refused]
    assert times[1] - times[0] >= 0.2  # not hammered
    [line] = [line for line in caplog.messages if "no space" in line]
    assert line.startswith("shard (owner ") and "nothing is lost: make room" in line
    assert audit(paths).committed == PROMPTS * SIBLINGS


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
                raise BusFullError(Path("shard"), OSError(errno.ENOSPC, "no space left"))
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
            raise BusFullError(Path("shard"), OSError(errno.ENOSPC, "no space left"))

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
