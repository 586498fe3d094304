"""Who stands still for whom when engines join others; engines and the wire are made up here."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from relax_hpc.comm.bucket import BucketPlan
from relax_hpc.comm.orders import Receipt, key_of
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import EngineError
from relax_hpc.fleet.members import Member
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights import group as weights_group
from relax_hpc.weights.exchange import MemberError
from relax_hpc.weights.group import MemberGroup


class Wire:
    """A communicator whose ranks find what is left for them."""

    is_asynchronous, size = True, 3

    def __init__(self):
        self.left, self.lock = {}, threading.Lock()

    def put(self, key, text):
        self.left[key] = text

    def take(self, key, *, timeout_s):
        return self.left.pop(key)

    def close(self):
        self.left["closed"] = ""


class Sent:
    def wait(self, deadline, give_up=None):
        pass


class Outgoing:
    skipped = ()

    def send(self, wire, wait):
        yield Sent()

    warm_up = send


class Engine:
    """Answers orders, and writes down in a diary of all what it was asked."""

    def __init__(self, name, rank, wire, diary):
        self.name, self.rank, self.wire, self.diary, self.fails = name, rank, wire, diary, ""

    def note(self, what):
        with self.wire.lock:
            self.diary.append(f"{self.name} {what}")

    def pause(self):
        self.note("pause")

    def receive_weights(self, orders, *, version):
        [order] = orders
        self.note(order.task)
        if order.task == self.fails:
            raise EngineError("no")
        self.wire.put(key_of(order.serial, self.rank), json.dumps(asdict(Receipt())))


def member(name):
    return Member(name, "1", "", 1, "sglang", "HEALTHY")


def group_of(names, taught, diary):
    wire = Wire()
    engines = {
        member(name): Engine(name, rank, wire, diary) for rank, name in enumerate(names, start=1)
    }
    threads = ThreadPoolExecutor(8)
    config = WeightsConfig(timeout_s=20)
    return MemberGroup(engines, "g", wire, config, threads, taught), engines


def sent(group):
    timers = Timers()
    receipts = group.send(1, Outgoing(), timers, check=False)
    return {each.id for each in receipts}, [name.split("/")[1] for name in timers.seconds]


def test_those_who_sample_stand_still_only_once_a_newcomer_knows_its_places():
    diary, taught = list[str](), {("old", "1")}
    group, _ = group_of(["new", "old"], taught, diary)
    assert sent(group) == ({"new", "old"}, ["learn", "pause", "prepare", "wire"])
    assert diary[:4] == ["new pause", "new learn", "old pause", "old learn"]
    assert sorted(diary[4:6]) == ["new prepare", "old prepare"]
    assert sorted(diary[6:]) == ["new receive", "old receive"]
    assert taught == {("new", "1"), ("old", "1")}
    diary.clear()
    assert sent(group)[1] == ["pause", "wire"]
    assert sorted(diary[:2]) == ["new pause", "old pause"]


@pytest.mark.parametrize("taught", [set(), {("a", "1"), ("b", "1")}])
def test_where_all_or_none_are_new_nobody_learns_ahead(taught):
    diary = list[str]()
    group, _ = group_of(["a", "b"], taught, diary)
    assert sent(group)[1] == ["pause", "prepare", "wire"]
    assert sorted(diary[:2]) == ["a pause", "b pause"]


def test_who_cannot_take_the_weights_says_so_before_anybody_uses_the_wire():
    """The first use of NCCL's waits for all, and cannot be ended."""
    diary = list[str]()
    group, engines = group_of(["a", "b"], set(), diary)
    engines[member("b")].fails = "learn"
    with pytest.raises(MemberError) as error:
        sent(group)
    assert error.value.reasons == {member("b"): "no"}
    assert not [line for line in diary if "prepare" in line]


def test_a_newcomer_that_cannot_learn_is_named_and_nobody_else_was_paused():
    diary = list[str]()
    group, engines = group_of(["new", "old"], {("old", "1")}, diary)
    engines[member("new")].fails = "learn"
    with pytest.raises(MemberError) as error:
        sent(group)
    assert error.value.reasons == {member("new"): "no"}
    assert diary == ["new pause", "new learn"]


class Joining(Engine):
    """Joins a group, or does not before `opened`."""

    def __init__(self, name, wire, diary, opened=None, error=None):
        super().__init__(name, 1, wire, diary)
        self.opened, self.error = opened, error

    def init_weights_group(self, *_):
        if self.error:
            raise self.error
        if self.opened:
            self.opened.wait(60)

    def destroy_weights_group(self, name):
        self.note("left")


@pytest.fixture
def formed(monkeypatch):
    """Forms a group as with NCCL, whose communicator is there before anybody has joined it."""
    wire, diary = Wire(), list[str]()
    monkeypatch.setattr(weights_group, "BroadcastGroup", lambda *_, **__: wire)
    store = SimpleNamespace(port=1)
    monkeypatch.setattr(weights_group, "open_store", lambda *_, **__: store)

    def form(timeout_s, **engines):
        with ThreadPoolExecutor(8) as threads:
            members = {member(n): Joining(n, wire, diary, **how) for n, how in engines.items()}
            plan, config = BucketPlan.of([], 1), WeightsConfig(timeout_s=timeout_s)
            try:
                return MemberGroup.form(members, plan, config, "nccl", threads, set())
            finally:
                for how in engines.values():
                    if "opened" in how:
                        how["opened"].set()

    return SimpleNamespace(form=form, wire=wire, diary=diary)


def test_who_does_not_join_in_time_is_blamed_and_nobody_stays_in_the_group(formed):
    with pytest.raises(MemberError) as error:
        formed.form(1, a={}, hung={"opened": threading.Event()})
    assert error.value.reasons == {member("hung"): "did not join the group within 1 s"}
    assert "closed" in formed.wire.left
    assert sorted(formed.diary) == ["a left", "hung left"]


def test_who_refuses_to_join_is_known_at_once_and_nobody_stays_in_the_group(formed):
    with pytest.raises(MemberError) as error:
        formed.form(60, a={"opened": threading.Event()}, b={"error": EngineError("no")})
    assert error.value.reasons == {member("b"): "no"}
    assert "closed" in formed.wire.left and "a left" in formed.diary
    formed.wire.left.clear()
    assert list(formed.form(60, a={}).receivers) == [member("a")]
    assert list(formed.wire.left) == ["plan"]
