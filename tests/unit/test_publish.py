"""Who gets which weights: the real publisher over the `files` transport, fake engines."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from relax_hpc.comm.bucket import BucketPlan, Spec
from relax_hpc.comm.orders import Receipt
from relax_hpc.comm.world import SoloWorld
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import EngineError, FencedError
from relax_hpc.fleet import members
from relax_hpc.fleet.members import Member
from relax_hpc.fleet.register import Register
from relax_hpc.fleet.roster import Roster, RosterEntry
from relax_hpc.paths import RunPaths
from relax_hpc.weights.exchange import MemberError
from relax_hpc.weights.publish import Publisher
from relax_hpc.weights.ranks import TrainerRanks
from relax_hpc.weights.snapshot import SnapshotWriter
from relax_hpc.weights.transport import behind
from relax_hpc.weights.verify import Sent, compare


class FakeEngine:
    def __init__(self, version=0):
        self.held, self.calls, self.alive, self.broken = version, [], True, False
        self.num_asked = 0
        self.weight = None
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


@pytest.fixture
def house(tmp_path):
    """A publisher of two members, their engines, and a way to announce them."""
    model, paths = tmp_path / "model", RunPaths(tmp_path / "run")
    model.mkdir()
    (model / "config.json").write_text("{}")
    engines = {}

    class House:
        def __init__(self):
            self.engines, self.paths = engines, paths

        def publisher(self, *, timeout_s=300, waits_for_loads=True):
            specs, world = [Spec("w", torch.float32, ())], SoloWorld()
            return Publisher(
                WeightsConfig(timeout_s=timeout_s),
                Register(
                    paths,
                    lambda: ["rollout-0", "rollout-1"],
                    lambda member: engines[member.id, member.start],
                ),
                BucketPlan.of(specs, 1 << 30),
                device=torch.device("cpu"),
                ranks=TrainerRanks(world, SnapshotWriter(paths.weights, specs, world, model), {}),
                waits_for_loads=waits_for_loads,
            )

        def holds(self, member):
            entry = Roster.read(paths).members[member]
            return entry.state, entry.version

        def wait_for(self, member, *state):
            deadline = time.monotonic() + 30
            while self.holds(member) != state:
                assert time.monotonic() < deadline, self.holds(member)
                time.sleep(0.01)

        @property
        def snapshots(self):
            return sorted(path.name[:7] for path in paths.weights.iterdir())

        def start(self, member, start="1", version=0):
            engines[member, start] = FakeEngine(version)
            record = Member(member, start, "", 1, "embedded", "HEALTHY", transport="files")
            members.announce(paths, record)
            return engines[member, start]

    return House()


def weights(value):
    return iter([("w", torch.tensor(float(value)))])


def test_every_engine_pauses_loads_and_resumes_in_this_order(house):
    engines = [house.start("rollout-0"), house.start("rollout-1")]
    published = house.publisher().publish(3, weights(7))
    assert (published.members, published.fenced) == (["rollout-0", "rollout-1"], [])
    for engine in engines:
        assert engine.calls == ["pause", "v3", "resume"]
        assert engine.weight == 7


@pytest.mark.parametrize(("calls", "held"), [(1, []), (2, ["pause", "v3", "resume"])])
def test_a_trainer_whose_place_was_taken_changes_no_engine_and_no_roster(house, calls, held):
    """Before engines are changed it asks, and before it says what they hold."""
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
    late = house.start("rollout-1")
    assert publisher.has_newcomers(every_s=0)
    assert publisher.publish(3, weights(7)).members == ["rollout-1"]
    assert (late.held, late.weight) == (3, 7)
    assert not publisher.has_newcomers(every_s=0)
    again = house.start("rollout-1", start="2")  # restarted, so it holds the first weights again
    assert publisher.has_newcomers(every_s=0)
    assert publisher.publish(3, weights(7)).members == ["rollout-1"]
    assert again.held == 3


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
    assert resumed.publish(13, weights(13)).members == ["rollout-0"]


def test_after_a_trainer_died_in_an_update_every_engine_is_given_weights_again(house):
    engine = house.start("rollout-0", version=12)
    torn = RosterEntry("1", None, "SYNCING")
    Roster(13, members={"rollout-0": torn}).write(house.paths)
    resumed = house.publisher()
    assert resumed.publish(10, weights(10)).members == ["rollout-0"]
    assert engine.calls == ["pause", "v10", "resume"]


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
    found = compare(engines, Sent([5, 6], "x"), receipts)
    assert found.equal == (held is None)
    assert found.members["c"] == "x"
    assert found.trainer == f"{found.members['b']} x"
    if held is None:
        assert found.members["a"] == found.members["b"]
    else:
        assert found.members["a"].startswith(held) and found.members["a"] != found.members["b"]
    assert not compare({silent: FakeEngine()}, Sent([], "y"), {}).equal


def test_a_dead_engine_is_left_out_without_waiting_for_it(house):
    house.start("rollout-0")
    house.start("rollout-1").alive = False
    assert house.publisher().publish(1, weights(1)).members == ["rollout-0"]


def test_whoever_does_not_answer_is_behind_a_failed_update_not_whoever_said_so_first():
    class Engine:
        def __init__(self, healthy):
            self.healthy = healthy

        def health(self, timeout_s):
            return self.healthy

    def member(id):
        return Member(id, "1", "http://x", 1, "sglang", "HEALTHY")

    with ThreadPoolExecutor(3) as threads:
        waited, hangs, well = map(member, ("waited", "hangs", "well"))
        live = {waited: Engine(True), hangs: Engine(False), well: Engine(True)}
        error = MemberError({waited: "timed out"})
        assert behind(threads, live, error) == {hangs: "does not answer"}
        assert behind(threads, live, MemberError({hangs: "timed out"})) == {hangs: "timed out"}
        live[hangs] = Engine(True)  # everybody answers, so who said that it failed is taken at it
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
    ended = [(each.member.id, each.version, each.reason) for each in publisher.ended_loads()]
    others = [("rollout-0", version, "") for version in range(1, 6)]
    assert ended == [*others, ("rollout-1", 1, ""), ("rollout-1", 5, "")]
    publisher.publish(6, weights(6))
    assert house.snapshots == ["v000005", "v000006"]


def test_what_goes_wrong_in_the_thread_of_a_load_ends_who_looks_for_its_end(house, monkeypatch):
    """Of a roster that could not be written nobody heard: its engine was fenced for being late."""
    house.start("rollout-0").gate.clear()
    publisher = house.publisher(waits_for_loads=False)
    assert publisher.publish(1, weights(1)).loading == ["rollout-0"]

    def full(register):
        raise PermissionError(13, "Permission denied", "weights.json")

    monkeypatch.setattr(Register, "write", full)
    house.engines["rollout-0", "1"].gate.set()
    with pytest.raises(PermissionError, match=r"weights\.json"):
        publisher.wait_for_loads()
    with pytest.raises(PermissionError):
        publisher.ended_loads()


def test_a_load_that_fails_or_takes_too_long_fences_its_engine_and_nobody_waits_for_it(house):
    bad, slow = house.start("rollout-0"), house.start("rollout-1")
    bad.broken = True
    slow.gate.clear()
    publisher = house.publisher(timeout_s=2, waits_for_loads=False)
    assert publisher.publish(1, weights(1)).loading == ["rollout-0", "rollout-1"]
    house.wait_for("rollout-0", "FENCED", None)
    assert not publisher.wait_for_loads()
    assert house.holds("rollout-1") == ("FENCED", None)
    reasons = {each.member.id: each.reason for each in publisher.ended_loads()}
    assert reasons == {"rollout-0": "broken", "rollout-1": "has not loaded v1 within 2 s"}
    slow.gate.set()
    while slow.calls != ["pause", "v1", "resume"]:
        time.sleep(0.01)
    assert publisher.ended_loads() == []  # too late
    assert house.holds("rollout-1") == ("FENCED", None)
    house.start("rollout-1", start="2")
    assert publisher.has_newcomers(every_s=0)
    assert publisher.publish(1, weights(1)).loading == ["rollout-1"]
    assert not publisher.wait_for_loads()
    assert house.holds("rollout-1") == ("ACTIVE", 1)
