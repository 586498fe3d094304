"""Rollout and trainer that need not be there at the same time: weights, pace and idleness."""

import asyncio
import os
import time
from dataclasses import asdict
from pathlib import Path

import episode_fakes
import pytest
import torch
from episode_fakes import answer
from role_fakes import Events, Journal, config
from safetensors.torch import load_file

from relax_hpc.bus.credits import Credit
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.data.source import Prompt
from relax_hpc.errors import EngineError, FencedError, SnapshotError
from relax_hpc.inference import members
from relax_hpc.inference.members import Member
from relax_hpc.roles.idle import SETTLED_S, Idle
from relax_hpc.roles.rollout.unfinished import AnnouncedEnd
from relax_hpc.runtime.comm.bucket import BucketPlan, Spec, digest
from relax_hpc.runtime.comm.orders import Receipt, receipt_file
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.files import storage
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.weights import pull_snapshot
from relax_hpc.weights.pull_snapshot import Newest, NewestVersion, Puller, SnapshotPublisher
from relax_hpc.weights.snapshot import MANIFEST, SnapshotWriter
from relax_hpc.weights.transport import TrainerRanks

APART = {"launch__layout": "separate", "weights__transport": "files"}
MEMBER = Member("rollout-0", "7.0-1-1", "", 1, "embedded", "STARTING")
SPECS = [Spec("w", torch.float32, ())]


def weights(value):
    return iter([("w", torch.tensor(float(value)))])


@pytest.fixture
def paths(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    found = RunPaths(tmp_path / "run")
    found.control.mkdir(parents=True)
    return found


def trainer(paths, timeout_s=300):
    """What one start of the trainer publishes with."""
    world = SoloWorld()
    writer = SnapshotWriter(paths.weights, SPECS, world, paths.root.parent / "model")
    ranks, plan = TrainerRanks(world, writer, {}), BucketPlan.of(SPECS, 1 << 30)
    return SnapshotPublisher(WeightsConfig(advanced={"timeout_s": timeout_s}), paths, plan, ranks)


class Engine:
    """Loads what it is told to; `at_load` may do something first."""

    def __init__(self, at_load=lambda: None):
        self.calls, self.weight, self.at_load = [], None, at_load

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")

    def update_weights_from_disk(self, path, version):
        self.at_load()
        if not Path(path).exists():
            raise EngineError(f"{path}: is gone")
        [file] = Path(path).glob("*.safetensors")
        self.weight = load_file(file)["w"].item()
        self.calls.append(f"v{version}")

    def checksum(self):
        return digest([("w", torch.tensor(self.weight))])


def puller(paths):
    return Puller(paths, Events(), timeout_s=60)


def due(each):
    each._next_look = 0.0
    return each.due()


# weights


def test_the_newest_stays_until_there_is_a_newer_one_whatever_clocks_say(paths, monkeypatch):
    publisher = trainer(paths)
    for version in (1, 2):
        publisher.publish(version, weights(version), check=False)
    there = {each.name[:7]: each / MANIFEST for each in paths.weights.iterdir()}
    os.utime(there["v000001"], (2_000_000_000, 2_000_000_000))
    os.utime(there["v000002"], (1_000_000_000, 1_000_000_000))

    def fail(*_args, **_kwargs):
        raise SnapshotError("killed")

    monkeypatch.setattr(SnapshotWriter, "write", fail)
    publisher.publish(3, weights(3), check=False)
    newest = Newest.read(paths)
    assert newest.version == 2 and newest.folder.exists()


def test_a_restarted_trainer_that_is_behind_leaves_engines_what_is_newer(paths):
    trainer(paths).publish(3, weights(3))
    restarted = trainer(paths)
    for version in (1, 2):
        restarted.publish(version, weights(-1))
        assert Newest.read(paths).version == 3
    restarted.publish(3, weights(30))
    restarted.publish(4, weights(4))
    assert Newest.read(paths).version == 4


def test_what_cannot_be_written_is_tried_again_later_and_not_for_ever(paths, monkeypatch):
    publisher, real = trainer(paths), SnapshotWriter.begin

    def fail(*_args, **_kwargs):
        raise SnapshotError("no room")

    monkeypatch.setattr(SnapshotWriter, "begin", fail)
    monkeypatch.setattr(pull_snapshot, "RETRY_S", 0.0)
    assert publisher.publish(1, weights(1)).error == "no room"
    assert publisher.has_newcomers() and publisher.wait_for_loads()
    monkeypatch.setattr(SnapshotWriter, "begin", real)
    publisher.publish(1, weights(1))
    assert Newest.read(paths).version == 1 and not publisher.has_newcomers()
    monkeypatch.setattr(SnapshotWriter, "begin", fail)
    short = trainer(paths, timeout_s=1)
    short.publish(2, weights(2))
    short._lacks_since -= 2
    with pytest.raises(SnapshotError, match="no room"):
        short.publish(2, weights(2))


def test_an_engine_pauses_loads_the_newest_and_goes_on_and_does_so_once(paths):
    publisher, engine, pulls = trainer(paths), Engine(), puller(paths)
    assert due(pulls) is None
    publisher.publish(1, weights(1))
    publisher.publish(2, weights(2))
    member = pulls.pull(engine, MEMBER, due(pulls))
    assert engine.calls == ["pause", "v2", "resume"] and engine.weight == 2
    assert member == MEMBER._replace(version=2)
    assert due(pulls) is None
    [loaded] = pulls._events.of("loaded")
    assert (loaded["version"], loaded["members"], loaded["fenced"]) == (2, ["rollout-0"], [])
    trainer(paths).publish(2, weights(20))  # made again, after a restart
    pulls.pull(engine, MEMBER, due(pulls))
    assert engine.weight == 20


def test_a_load_whose_files_are_gone_meanwhile_is_of_the_newest(paths):
    publisher = trainer(paths)
    publisher.publish(1, weights(1))
    pulls = puller(paths)
    found = due(pulls)

    def overtaken():
        if not paths.weights.joinpath("done").exists():
            for version in (2, 3):
                publisher.publish(version, weights(version))
            paths.weights.joinpath("done").touch()

    engine = Engine(overtaken)
    assert pulls.pull(engine, MEMBER, found).version == 3
    assert engine.calls == ["pause", "pause", "v3", "resume"], "never resumed with half of one"


def test_an_engine_that_loads_nothing_stays_paused_and_is_given_up(paths):
    trainer(paths).publish(1, weights(1))

    def broken():
        raise EngineError("out of memory")

    engine, pulls = Engine(broken), puller(paths)
    with pytest.raises(EngineError, match="did not load v1: out of memory"):
        pulls.pull(engine, MEMBER, due(pulls))
    assert engine.calls == ["pause"]
    [loaded] = pulls._events.of("loaded")
    assert (loaded["members"], loaded["fenced"]) == ([], ["rollout-0"])


def test_the_ranks_of_an_engine_that_takes_orders_say_which_tokens_were_of_which_policy(paths):
    publisher, pulls = trainer(paths), puller(paths)
    publisher.publish(1, weights(1))
    tasks = []

    class Ordered(Engine):
        def receive_weights(self, orders, *, version):
            assert self.calls == ["pause", f"v{version}"], "while requests stand still"
            for rank, order in enumerate(orders):
                tasks.append(order.task)
                path = receipt_file(order.folder, order.serial, rank)
                write_json(path, asdict(Receipt(num_sampled={f"request {rank}": 5})))
            publisher.publish(2, weights(2))  # which clears away what is old

    member = MEMBER._replace(engine="sglang", num_ranks=2)
    pulls.pull(Ordered(), member, due(pulls))
    said = read_json(paths.switch(member.id, member.start, 1))
    assert said == {"num_sampled": {"request 0": 5, "request 1": 5}}
    assert tasks == ["count", "count"]
    assert not [each for each in paths.weights.iterdir() if each.name.startswith(".receipt")]


# a trainer whose place another has taken, or that comes after one


def held_up_at_its_end(monkeypatch, act):
    """The next snapshot is written whole, and then `act` happens before it is named."""
    real, acts = SnapshotWriter.finish, [act]

    def finish(self, name, records):
        snapshot = real(self, name, records)
        if acts:
            acts.pop()()
        return snapshot

    monkeypatch.setattr(SnapshotWriter, "finish", finish)


def test_a_trainer_that_wakes_after_another_took_over_leaves_the_record_alone(paths, monkeypatch):
    old, new, fences = trainer(paths), trainer(paths), [1]

    def check_fenced():
        if fences[-1] > 1:
            raise FencedError("plan fence 2 was claimed after 1")

    def overtaken():
        fences.append(2)
        assert new.publish(10, weights(10)).transport == "files"

    held_up_at_its_end(monkeypatch, overtaken)
    with pytest.raises(FencedError, match="fence 2"):
        old.publish(11, weights(-11), check_fenced=check_fenced)
    newest = Newest.read(paths)
    assert newest.version == 10 and newest.folder.is_dir()
    assert new.publish(11, weights(11)).transport == "files"
    assert Newest.read(paths).version == 11


def test_a_version_that_was_left_meanwhile_is_not_taken_back(paths, monkeypatch):
    """By the trainer before, which had got further, in its last moment."""
    before, publisher = trainer(paths), trainer(paths)
    held_up_at_its_end(monkeypatch, lambda: before.publish(11, weights(11)))
    publisher.publish(10, weights(10))
    newest = Newest.read(paths)
    assert newest.version == 11 and newest.folder.is_dir()
    assert publisher.publish(10, weights(10)).transport is None and not publisher.has_newcomers()
    storage.delete_folder(newest.folder)  # nobody can load it: engines have none
    publisher.publish(10, weights(10))
    assert Newest.read(paths).version == 10


@pytest.mark.parametrize(
    ("there", "comes", "wins"),
    [("7.1-1-1", "7.0-9-2", False), ("7.0-2-1", "7.0-1-3", False), ("7.0-10-1", "7.0-9-1", False),
     ("7.0-1-3", "7.0-1-1", True), ("7.0-1-1", "7.0-2-0", True), ("7.9-1-1", "7.10-1-1", True),
     ("9.0-1-1", "7.0-1-1", True), ("local-12.1-1-1", "local-11.0-1-1", True),
     ("local-12.1-1-1", "local-12.0-1-1", False)],
)  # fmt: skip
def test_an_owner_that_wakes_does_not_announce_its_engine_over_a_later_one(
    paths, there, comes, wins
):
    """Of two jobs nobody knows; within a task the engine's owner is one."""
    first = Member("rollout-0", there, "http://x", 1, "embedded", "HEALTHY")
    members.announce(paths, first)
    second = first._replace(start=comes, state="FAILED")
    members.announce(paths, second)
    assert members.find(paths, "rollout-0") == (second if wins else first)


def test_a_version_counts_as_left_only_while_the_record_names_it(paths):
    publisher, other = trainer(paths), trainer(paths)
    other.publish(1, weights(1))
    older = Newest.read(paths)
    publisher.publish(2, weights(2))
    older.write(paths)  # by a trainer that knows of no fence
    assert publisher.publish(2, weights(2)).transport == "files"
    assert Newest.read(paths).version == 2
    assert publisher.publish(2, weights(2)).transport is None


# pace


class Sampler:
    """Engines that hold a version until the test gives them another."""

    def __init__(self, journal):
        self.now, self.journal, self.gate = 0, journal, asyncio.Event()

    async def version(self):
        return self.now

    async def sample(self, given, draft, how, *, seed, homes):
        self.journal.note("sample", given[1] - 100)
        await self.gate.wait()
        return answer(draft, [5], [-0.5], [(0, self.now)])


class NoTrainer:
    """Credits of a trainer that has never been there, until it has finished."""

    def __init__(self):
        self.credit = None

    def latest(self):
        return self.credit


class Folder(episode_fakes.Folder):
    def __init__(self):
        super().__init__()
        self.guids = []

    def put(self, groups):
        self.guids += [group.guid for group in groups]


class End(episode_fakes.NoEnd):
    def __init__(self):
        self.said = []

    def note(self, version, *, idle):
        self.said.append((version, idle))


async def test_rollout_without_a_trainer_goes_as_far_as_it_may_then_is_idle_till_it_comes():
    journal, events = Journal(), Events()
    made = config(
        schedule__num_steps=6, schedule__prompts_per_step=2, schedule__max_staleness=1,
        rollout__advanced__groups_per_shard=1, algorithm__groups__name="as_sampled", **APART,
    )  # fmt: skip
    prompts = [Prompt(index=i, token_ids=[7, 100 + i], answer="") for i in range(12)]
    sampler, credits, folder, end = Sampler(journal), NoTrainer(), Folder(), End()
    whole = episode_fakes.run(
        made, prompts, prompts[:1], sampler, lambda *_: 1.0, folder, credits,
        events, end=end,
    )  # fmt: skip

    running = asyncio.create_task(whole)
    await asyncio.sleep(0.3)
    assert {*end.said} == {(0, False)}, "it samples"
    sampler.gate.set()
    for version, guids in ((0, 4), (3, 10), (4, 12)):  # (version + 1 + staleness) x 2
        sampler.now = version
        deadline = time.monotonic() + 20
        while end.said[-1:] != [(version, True)]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert sorted(folder.guids) == [*range(guids)]
    credits.credit = Credit(step=6, policy_version=6, finished=True)
    await asyncio.sleep(0.2)
    assert not running.done(), "the last policy is to be loaded and evaluated"
    sampler.now = 6
    await asyncio.wait_for(running, 20)


def test_rollout_is_not_idle_while_its_engines_do_not_hold_the_newest_weights(paths):
    trainer(paths).publish(2, weights(2))
    said = []
    idle = Idle(None)
    idle.note = lambda *, idle: said.append(idle)
    end = AnnouncedEnd(None, None, idle, NewestVersion(config(**APART), paths))
    for version in (None, 0, 1, 2):
        end.note(version, idle=True)
    end.note(2, idle=False)
    assert said == [False, False, False, True, False]
    assert NewestVersion(config(), paths)() == 0


# idleness


def test_a_task_says_since_when_it_has_nothing_to_do_once_that_has_settled(paths, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("relax_hpc.roles.idle.time.time", lambda: now[0])
    path = paths.idle("7.0", "rollout-0")
    idle = Idle(path)

    def said():
        return read_json(path)["since"]

    assert said() is None
    idle.note(idle=True)
    now[0] += SETTLED_S / 2
    idle.note(idle=True)
    assert said() is None
    idle.note(idle=False)  # a moment's work: it counts anew
    idle.note(idle=True)
    now[0] += 2 * SETTLED_S
    idle.note(idle=True)
    assert said() == 100.0 + SETTLED_S / 2
    before = path.stat().st_ino
    idle.note(idle=True)
    assert path.stat().st_ino == before, "it is said once"
    idle.note(idle=False)
    assert said() is None
    Idle(None).note(idle=True)  # nobody asks
