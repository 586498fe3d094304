"""Who gets which weights, and engines that sleep on the trainer's GPUs: the real publisher over the
`files` transport, fake engines."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from roles.role_fakes import wait_for
from safetensors.torch import load_file

from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import EngineError, FencedError, PeerTimeoutError
from relax_hpc.inference import members
from relax_hpc.inference.members import EngineRegistry, Member, Roster, RosterEntry
from relax_hpc.runtime.comm.bucket import BucketPlan, Spec
from relax_hpc.runtime.comm.orders import Receipt
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.weights.publish import Publisher
from relax_hpc.weights.same_gpu import Sleep
from relax_hpc.weights.snapshot import SnapshotWriter
from relax_hpc.weights.transport import MemberError, SentDigests, TrainerRanks, behind, compare

ATTEMPT = "17.0"


class FakeEngine:
    """Has requests that end when they are aborted, unless it is stubborn."""

    def __init__(self, version=0, requests=0, *, stubborn=False):
        self.held, self.calls, self.alive, self.broken = version, [], True, False
        self.num_asked, self.weight, self.requests, self.stubborn = 0, None, requests, stubborn
        self.gate = threading.Event()
        """Gate of loading."""
        self.gate.set()

    def health(self, timeout_s):
        self.num_asked += 1
        return self.alive

    def version(self):
        return self.held

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")

    def shut(self):
        self.calls.append("shut")

    def checksum(self):
        return "x"

    def update_weights_from_disk(self, path, version):
        assert self.gate.wait(60)
        if self.broken:
            raise EngineError("broken")
        [file] = Path(path).glob("*.safetensors")
        self.weight = load_file(file)["w"].item()
        self.held = version
        self.calls.append(f"v{version}")

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


class House:
    """A publisher of two members, their engines, and a way to announce them."""

    def __init__(self, folder):
        self.engines, self.paths, self.model = {}, RunPaths(folder / "run"), folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")

    def publisher(self, *, timeout_s=300, waits_for_loads=True):
        specs, world = [Spec("w", torch.float32, ())], SoloWorld()
        snapshots = SnapshotWriter(self.paths.weights, specs, world, self.model)
        self.register = EngineRegistry(
            self.paths,
            lambda: ["rollout-0", "rollout-1"],
            lambda member: self.engines[member.id, member.start],
        )
        return Publisher(
            WeightsConfig(advanced={"timeout_s": timeout_s}),
            self.register, BucketPlan.of(specs, 1 << 30),
            device=torch.device("cpu"), ranks=TrainerRanks(world, snapshots, {}),
            waits_for_loads=waits_for_loads,
        )  # fmt: skip

    def holds(self, member):
        entry = Roster.read(self.paths).members[member]
        return entry.state, entry.version

    def wait_for(self, member, *state):
        wait_for(lambda: self.holds(member) == state, 30)

    @property
    def snapshots(self):
        return sorted(path.name[:7] for path in self.paths.weights.iterdir())

    def announce(self, member, start, state="HEALTHY"):
        record = Member(member, start, "", 1, "embedded", state, transport="files")
        members.announce(self.paths, record)

    def start(self, member, start="1", version=0):
        self.engines[member, start] = FakeEngine(version)
        self.announce(member, start)
        return self.engines[member, start]

    # Trainers that follow each other, and engines on their GPUs.

    def trainer(self, attempt=ATTEMPT, start_timeout_s=0.5):
        publisher = self.publisher()
        asleep = Sleep(self.register, attempt, timeout_s=1, start_timeout_s=start_timeout_s)
        return asleep, publisher

    def begin(self, **how):
        engine = self.engines["rollout-0", f"{ATTEMPT}-1-1"] = FakeEngine(**how)
        self.say("HEALTHY")
        return engine

    def say(self, state, start=1):
        self.announce("rollout-0", f"{ATTEMPT}-1-{start}", state)


def weights(value):
    return iter([("w", torch.tensor(float(value)))])


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


@pytest.mark.parametrize(("calls", "held"), [(1, []), (2, ["pause", "v3", "resume"])])
def test_a_trainer_whose_place_was_taken_changes_no_engine_and_no_roster(house, calls, held):
    engine, asked = house.start("rollout-0"), []

    def check_fenced():
        asked.append(engine.calls[:])
        if len(asked) == calls:
            raise FencedError("another trainer took over")

    with pytest.raises(FencedError):
        house.publisher().publish(3, weights(7), check_fenced=check_fenced)
    assert engine.calls == held and asked[-1] == held
    said = Roster.read(house.paths)
    assert said is None if calls == 1 else said.members["rollout-0"].state == "SYNCING"


def test_an_engine_that_starts_later_gets_the_current_version_once(house):
    publisher = house.publisher()
    assert publisher.publish(3, weights(7)).members == []
    for start in ("1", "2"):  # restarted, it holds the first weights again
        late = house.start("rollout-1", start)
        assert publisher.has_newcomers(every_s=0)
        assert publisher.publish(3, weights(7)).members == ["rollout-1"]
        assert (late.held, late.weight) == (3, 7)
        assert not publisher.has_newcomers(every_s=0)


def test_a_failed_update_fences_that_engine_until_it_restarts_and_never_resumes_it(house):
    good, bad = house.start("rollout-0"), house.start("rollout-1")
    bad.broken = True
    publisher = house.publisher()
    published = publisher.publish(1, weights(1))
    assert (published.members, published.fenced) == (["rollout-0"], ["rollout-1"])
    assert bad.calls == ["pause"]
    bad.broken, asked = False, bad.num_asked
    published = publisher.publish(2, weights(2))
    assert (published.members, published.fenced) == (["rollout-0"], [])
    assert (good.held, bad.calls, bad.num_asked) == (2, ["pause"], asked)
    house.start("rollout-1", start="2")
    assert publisher.publish(3, weights(3)).members == ["rollout-0", "rollout-1"]


def test_engines_do_not_go_back_when_a_trainer_resumes_from_an_older_checkpoint(house):
    engine = house.start("rollout-0")
    first = house.publisher()
    first.publish(12, weights(12))
    resumed = house.publisher()
    assert resumed.publish(10, weights(10)).members == []
    assert resumed.publish(11, weights(11)).members == []
    assert (engine.held, engine.weight) == (12, 12)
    assert resumed.publish(12, weights(12)).members == ["rollout-0"]


def test_after_a_trainer_died_in_an_update_no_engine_gets_an_older_policy_in_place(house):
    # What a torn one says that it holds, nobody can rely on.
    torn, whole = house.start("rollout-0", version=9), house.start("rollout-1", version=12)
    last = {
        "rollout-0": RosterEntry("1", None, "SYNCING"),
        "rollout-1": RosterEntry("1", 12, "ACTIVE"),
    }
    Roster(12, last).write(house.paths)
    resumed = house.publisher()
    assert resumed.publish(10, weights(10)).members == []
    assert (torn.calls, whole.calls) == ([], [])
    # Its owner reads that it is fenced; of the other one nothing has changed.
    said = Roster.read(house.paths)
    assert (said.version, said.members["rollout-1"]) == (12, last["rollout-1"])
    assert (said.members["rollout-0"].state, said.serves("rollout-1", "1")) == ("FENCED", True)
    # A trainer that dies before the owner has read it changes nothing about that.
    second = house.publisher()
    assert second.publish(10, weights(10)).members == [] and torn.calls == []
    again = house.start("rollout-0", start="2")
    assert second.publish(11, weights(11)).members == ["rollout-0"]
    assert (again.calls, whole.calls) == (["pause", "v11", "resume"], [])
    assert second.publish(12, weights(12)).members == ["rollout-0", "rollout-1"]


@pytest.mark.parametrize(
    ("ranks", "held"),
    [
        ([Receipt(fingerprints=[5, 6]), Receipt(fingerprints=[5, 6])], None),
        ([Receipt(fingerprints=[5, 6]), Receipt(fingerprints=[6, 5])], "the ranks received diff"),
        ([Receipt(fingerprints=[5, 6], differing=2), Receipt(differing=1)], "3 slices differ"),
        ([Receipt(fingerprints=[5, 6]), Receipt(error="out of memory")], "out of memory"),
        ([Receipt(fingerprints=[6, 5])], ""),
    ],
)
def test_an_engine_holds_what_was_sent_if_every_rank_received_it_and_has_it(ranks, held):
    member, other = (Member(i, "1", "", 2, "sglang", "HEALTHY") for i in ("a", "b"))
    silent = Member("c", "1", "", 1, "embedded", "HEALTHY")
    receipts = {member: ranks, other: [Receipt(fingerprints=[5, 6])]}
    engines = {it: FakeEngine() for it in (member, other, silent)}
    found = compare(engines, SentDigests([5, 6], "x"), receipts)
    assert found.equal == (held is None)
    assert found.members["c"] == "x"
    assert found.trainer == f"{found.members['b']} x"
    if held is None:
        assert found.members["a"] == found.members["b"]
    else:
        assert found.members["a"].startswith(held) and found.members["a"] != found.members["b"]
    assert not compare({silent: FakeEngine()}, SentDigests([], "y"), {}).equal


def test_whoever_does_not_answer_is_behind_a_failed_update_not_whoever_said_so_first():
    def member(id):
        return Member(id, "1", "http://x", 1, "sglang", "HEALTHY")

    with ThreadPoolExecutor(3) as threads:
        waited, hangs, well = map(member, ("waited", "hangs", "well"))
        live = {each: FakeEngine() for each in (waited, hangs, well)}
        live[hangs].alive = False
        error = MemberError({waited: "timed out"})
        assert behind(threads, live, error) == {hangs: "does not answer"}
        assert behind(threads, live, MemberError({hangs: "timed out"})) == {hangs: "timed out"}
        live[hangs].alive = True  # everybody answers, so who said that it failed is taken at it
        assert behind(threads, live, error) == {waited: "timed out"}


def test_versions_go_on_while_one_loads_and_it_skips_to_the_newest_when_it_is_done(house):
    fast, slow = house.start("rollout-0"), house.start("rollout-1")
    slow.gate.clear()
    publisher = house.publisher(waits_for_loads=False)
    for version in range(1, 6):
        published = publisher.publish(version, weights(version))
        names = ["rollout-0", "rollout-1"] if version == 1 else ["rollout-0"]
        assert (published.loading, published.members, published.again) == (names, [], False)
        house.wait_for("rollout-0", "ACTIVE", version)  # although the publisher does nothing
        assert house.holds("rollout-1") == ("SYNCING", None)
        assert not publisher.has_newcomers(every_s=0)
    assert house.snapshots == ["v000001", "v000004", "v000005"]  # that of the slow one stays
    slow.gate.set()
    house.wait_for("rollout-1", "ACTIVE", 1)
    assert not Roster.read(house.paths).serves("rollout-1", "1")
    assert publisher.has_newcomers(every_s=0)
    assert publisher.publish(5, weights(5)).loading == ["rollout-1"]
    assert not publisher.wait_for_loads()
    assert slow.calls == ["pause", "v1", "resume", "pause", "v5", "resume"]
    assert (slow.weight, fast.weight, fast.calls.count("v5")) == (5, 5, 1)
    ended = [(each.member.id, each.version, each.reason) for each in publisher.take_ended_loads()]
    others = [("rollout-0", version, "") for version in range(1, 6)]
    assert ended == [*others, ("rollout-1", 1, ""), ("rollout-1", 5, "")]


def test_what_goes_wrong_in_the_thread_of_a_load_ends_who_looks_for_its_end(house, monkeypatch):
    house.start("rollout-0").gate.clear()
    publisher = house.publisher(waits_for_loads=False)
    assert publisher.publish(1, weights(1)).loading == ["rollout-0"]

    def full(register):
        raise PermissionError(13, "Permission denied", "weights.json")

    monkeypatch.setattr(EngineRegistry, "write", full)
    house.engines["rollout-0", "1"].gate.set()
    for look in (publisher.wait_for_loads, publisher.take_ended_loads):
        with pytest.raises(PermissionError, match=r"weights\.json"):
            look()


def test_a_load_that_fails_or_takes_too_long_fences_its_engine_and_nobody_waits_for_it(house):
    bad, slow = house.start("rollout-0"), house.start("rollout-1")
    bad.broken = True
    slow.gate.clear()
    publisher = house.publisher(timeout_s=2, waits_for_loads=False)
    assert publisher.publish(1, weights(1)).loading == ["rollout-0", "rollout-1"]
    house.wait_for("rollout-0", "FENCED", None)
    assert not publisher.wait_for_loads()
    assert house.holds("rollout-1") == ("FENCED", None)
    reasons = {each.member.id: each.reason for each in publisher.take_ended_loads()}
    assert reasons == {"rollout-0": "broken", "rollout-1": "has not loaded v1 within 2 s"}
    slow.gate.set()
    wait_for(lambda: slow.calls == ["pause", "v1", "resume"])
    assert publisher.take_ended_loads() == []  # too late
    assert house.holds("rollout-1") == ("FENCED", None)


@pytest.fixture
def beds(tmp_path):
    return House(tmp_path)


def test_requests_are_handed_back_and_memory_is_taken_again_before_weights_are_loaded(beds):
    engine = beds.begin(requests=2)
    asleep, publisher = beds.trainer()
    asleep.fall_asleep()
    assert engine.calls == ["abort", "shut", "pause", "release weights kv_cache"]
    assert beds.holds("rollout-0")[0] == "ASLEEP"
    assert not members.is_with_engines(beds.paths, ATTEMPT)
    engine.calls.clear()
    asleep.wake()
    assert members.is_with_engines(beds.paths, ATTEMPT)
    assert publisher.publish(3, weights(7)).members == ["rollout-0"]
    assert engine.calls == ["take weights", "take kv_cache", "pause", "v3", "resume"]
    assert Roster.read(beds.paths).serves("rollout-0", f"{ATTEMPT}-1-1")


@pytest.mark.parametrize("when", ["pause", "release"])
def test_who_asks_while_an_engine_is_paused_is_handed_back_too(beds, when):
    """An embedded engine counts what it keeps for later, and refuses to sleep with it."""

    late = {when: 3}

    class Asked(FakeEngine):
        def pause(self):
            super().pause()
            self.requests = late.pop("pause", 0)

        def release_memory(self, tags):
            assert not self.requests, "SGLang would end"
            self.requests += late.pop("release", 0)
            if self.requests:
                raise EngineError("only an idle engine releases memory")
            super().release_memory(tags)

    beds.begin()
    engine = beds.engines["rollout-0", f"{ATTEMPT}-1-1"] = Asked()
    asleep, _ = beds.trainer()
    asleep.fall_asleep()
    assert engine.calls[:6] == ["shut", "pause", "resume", "abort", "shut", "pause"]
    assert engine.calls[6].startswith("release") and beds.holds("rollout-0")[0] == "ASLEEP"


def test_an_engine_that_does_not_stop_is_fenced_and_named_until_its_owner_ends_it(beds):
    beds.begin(requests=2, stubborn=True)
    with pytest.raises(PeerTimeoutError, match=r"not ended within 0\.5 s: rollout-0"):
        beds.trainer()[0].fall_asleep()
    assert beds.holds("rollout-0")[0] == "FENCED"
    reason = Roster.read(beds.paths).members["rollout-0"].reason
    assert "2 requests still run" in reason
    beds.say("WAITING", start=2)
    asleep, _ = beds.trainer()
    asleep.fall_asleep()  # nobody has memory any more


def test_the_trainer_that_follows_wakes_who_sleeps_and_gives_it_weights_although_they_are_older(
    beds,
):
    engine = beds.begin()
    asleep, publisher = beds.trainer()
    publisher.publish(12, weights(12))
    asleep.fall_asleep()
    asleep, publisher = beds.trainer()
    asleep.fall_asleep()
    engine.calls.clear()
    asleep.wake()
    assert publisher.publish(10, weights(10)).members == ["rollout-0"]
    assert engine.calls == ["take weights", "take kv_cache", "pause", "v10", "resume"]


def test_a_fenced_engine_whose_task_died_is_waited_for_as_long_as_a_start_may_take(beds):
    beds.begin().alive = False
    asleep, _ = beds.trainer(start_timeout_s=60)
    again = threading.Timer(1, beds.say, ("WAITING", 2))
    again.start()
    asleep.fall_asleep()
    again.join()
    assert members.find(beds.paths, "rollout-0").state == "WAITING"


def test_an_engine_of_an_attempt_that_slurm_ended_while_it_fell_asleep_is_not_waited_for(beds):
    beds.begin()
    asleep, _ = beds.trainer()
    asleep._register.note(members.find(beds.paths, "rollout-0"), "SYNCING")
    asleep._register.write()
    beds.trainer(attempt="17.1")[0].fall_asleep()
    assert not members.is_with_engines(beds.paths, "17.1")
