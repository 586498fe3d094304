"""Engines on the trainer's GPUs fall asleep and wake: the real register, publisher and records."""

import threading

import pytest
import torch
from test_publish import FakeEngine, weights

from relax_hpc.comm.bucket import BucketPlan, Spec
from relax_hpc.comm.world import SoloWorld
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import EngineError, PeerTimeoutError
from relax_hpc.fleet import lease, members
from relax_hpc.fleet.members import Member
from relax_hpc.fleet.register import Register
from relax_hpc.fleet.roster import Roster
from relax_hpc.paths import RunPaths
from relax_hpc.weights import sleep
from relax_hpc.weights.publish import Publisher
from relax_hpc.weights.ranks import TrainerRanks
from relax_hpc.weights.sleep import Sleep
from relax_hpc.weights.snapshot import SnapshotWriter

ATTEMPT = "17.0"


class FakeSleeper(FakeEngine):
    """Has requests that end when they are aborted, unless it is stubborn."""

    def __init__(self, requests=0, *, stubborn=False):
        super().__init__()
        self.requests, self.stubborn = requests, stubborn

    def num_requests(self):
        if not self.alive:
            raise EngineError("no answer")
        return self.requests

    def abort_all(self):
        self.calls.append("abort")
        self.requests = self.requests if self.stubborn else 0

    def release_memory(self, tags):
        self.calls.append(f"release {' '.join(tags)}")

    def resume_memory(self, tags):
        self.calls.append(f"take {' '.join(tags)}")


@pytest.fixture
def house(tmp_path, monkeypatch):
    """Engines of a run, and the parts of trainers that follow each other."""
    monkeypatch.setattr(sleep, "NOTICE_S", 0.2)
    model, paths, engines = tmp_path / "model", RunPaths(tmp_path / "run"), {}
    model.mkdir()
    (model / "config.json").write_text("{}")

    class House:
        def __init__(self):
            self.engines, self.paths = engines, paths

        def trainer(self, attempt=ATTEMPT, start_timeout_s=0.5):
            ids = ["rollout-0", "rollout-1"]
            register = Register(paths, lambda: ids, lambda m: engines[m.id, m.start])
            specs, world = [Spec("w", torch.float32, ())], SoloWorld()
            snapshots = SnapshotWriter(paths.weights, specs, world, model)
            publisher = Publisher(
                WeightsConfig(), register, BucketPlan.of(specs, 1 << 30),
                device=torch.device("cpu"), ranks=TrainerRanks(world, snapshots, {}),
            )  # fmt: skip
            asleep = Sleep(register, attempt, timeout_s=1, start_timeout_s=start_timeout_s)
            return asleep, publisher

        def start(self, member, engine, start=1):
            engines[member, f"{ATTEMPT}-1-{start}"] = engine
            self.announce(member, "HEALTHY", start)
            return engine

        def announce(self, member, state, start=1):
            name = f"{ATTEMPT}-1-{start}"
            record = Member(member, name, "", 1, "embedded", state, transport="files")
            members.announce(paths, record)

        def state(self, member):
            return Roster.read(paths).members[member].state

    return House()


def test_memory_is_given_back_and_taken_again_before_weights_are_loaded(house):
    engine = house.start("rollout-0", FakeSleeper())
    asleep, publisher = house.trainer()
    asleep.fall_asleep()
    assert engine.calls == ["pause", "release weights kv_cache"]
    assert house.state("rollout-0") == "ASLEEP"
    assert not lease.is_with_engines(house.paths, ATTEMPT)
    engine.calls.clear()
    asleep.wake()
    assert lease.is_with_engines(house.paths, ATTEMPT)
    assert publisher.publish(3, weights(7)).members == ["rollout-0"]
    assert engine.calls == ["take weights", "take kv_cache", "pause", "v3", "resume"]
    assert Roster.read(house.paths).serves("rollout-0", f"{ATTEMPT}-1-1")


def test_an_engine_is_not_asked_to_release_twice(house):
    engine = house.start("rollout-0", FakeSleeper())
    asleep, _ = house.trainer()
    asleep.fall_asleep()
    asleep.fall_asleep()
    assert engine.calls.count("release weights kv_cache") == 1


def test_what_an_engine_still_has_to_do_is_handed_back_first(house):
    engine = house.start("rollout-0", FakeSleeper(requests=2))
    house.trainer()[0].fall_asleep()
    assert engine.calls == ["abort", "pause", "release weights kv_cache"]


def test_who_asks_while_an_engine_is_paused_is_handed_back_too(house):
    """It was idle when it was looked at, and a client had not noticed yet that it is to sleep."""

    class Asked(FakeSleeper):
        late = 3

        def pause(self):
            super().pause()
            self.requests, self.late = self.late, 0

        def release_memory(self, tags):
            assert not self.requests, "only an idle engine releases memory"
            super().release_memory(tags)

    engine = Asked()
    house.start("rollout-0", engine)
    asleep, _ = house.trainer()
    asleep.fall_asleep()
    assert engine.calls[:4] == ["pause", "resume", "abort", "pause"]
    assert engine.calls[4].startswith("release")


def test_an_engine_that_does_not_stop_is_fenced_and_named_until_its_owner_ends_it(house):
    house.start("rollout-0", FakeSleeper(requests=2, stubborn=True))
    with pytest.raises(PeerTimeoutError, match=r"not ended within 0\.5 s: rollout-0"):
        house.trainer()[0].fall_asleep()
    assert house.state("rollout-0") == "FENCED"
    reason = Roster.read(house.paths).members["rollout-0"].reason
    assert "2 requests still run" in reason
    house.announce("rollout-0", "WAITING", start=2)
    asleep, _ = house.trainer()
    asleep.fall_asleep()  # nobody has memory any more


def test_an_engine_that_starts_is_waited_for_and_named(house):
    house.announce("rollout-1", "STARTING")
    with pytest.raises(PeerTimeoutError, match=r"still starting after 0\.5 s.*rollout-1"):
        house.trainer()[0].fall_asleep()
    house.announce("rollout-1", "WAITING")
    house.trainer()[0].fall_asleep()


def test_the_trainer_that_follows_wakes_who_sleeps_and_gives_it_weights_although_they_are_older(
    house,
):
    engine = house.start("rollout-0", FakeSleeper())
    asleep, publisher = house.trainer()
    publisher.publish(12, weights(12))
    asleep.fall_asleep()
    asleep, publisher = house.trainer()
    asleep.fall_asleep()
    engine.calls.clear()
    asleep.wake()
    assert publisher.publish(10, weights(10)).members == ["rollout-0"]
    assert engine.calls == ["take weights", "take kv_cache", "pause", "v10", "resume"]


def test_an_engine_whose_trainer_died_while_it_fell_asleep_is_fenced(house):
    engine = house.start("rollout-0", FakeSleeper())
    asleep, _ = house.trainer()
    asleep._register.note(members.find(house.paths, "rollout-0"), "SYNCING")
    asleep._register.write()
    follower, _ = house.trainer()
    with pytest.raises(PeerTimeoutError, match="rollout-0"):
        follower.fall_asleep()
    assert house.state("rollout-0") == "FENCED"
    assert engine.calls == []


def test_a_fenced_engine_whose_task_died_is_waited_for_as_long_as_a_start_may_take(house):
    """The task is started again, and reads its data, before it says anything of its engine."""
    house.start("rollout-0", FakeSleeper()).alive = False
    asleep, _ = house.trainer(start_timeout_s=60)
    again = threading.Timer(1, house.announce, ("rollout-0", "WAITING"), {"start": 2})
    again.start()
    asleep.fall_asleep()
    again.join()
    assert members.find(house.paths, "rollout-0").state == "WAITING"


def test_an_engine_of_an_attempt_that_slurm_ended_while_it_fell_asleep_is_not_waited_for(house):
    """Its owner says something new only once it has read its data again, which may take long."""
    house.start("rollout-0", FakeSleeper())
    asleep, _ = house.trainer()
    asleep._register.note(members.find(house.paths, "rollout-0"), "SYNCING")
    asleep._register.write()
    house.trainer(attempt="17.1")[0].fall_asleep()
    assert not lease.is_with_engines(house.paths, "17.1")


def test_an_engine_that_does_not_wake_is_fenced_and_the_other_goes_on(house):
    bad = house.start("rollout-0", FakeSleeper())
    house.start("rollout-1", FakeSleeper())
    asleep, publisher = house.trainer()
    asleep.fall_asleep()

    def refuse(tags):
        raise EngineError("out of memory")

    bad.resume_memory = refuse
    published = publisher.publish(1, weights(1))
    assert (published.members, published.fenced) == (["rollout-1"], ["rollout-0"])
    assert bad.calls[-1] == "release weights kv_cache"


def test_a_lease_of_an_earlier_attempt_lets_nobody_start(house):
    lease.give(house.paths, "17.0", "engines")
    assert lease.is_with_engines(house.paths, "17.0")
    assert not lease.is_with_engines(house.paths, "17.1")
