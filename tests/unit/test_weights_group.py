"""Who stands still for whom when engines join others; engines and the wire are made up here."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from relax_hpc.comm.orders import Receipt, key_of
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import EngineError
from relax_hpc.fleet.members import Member
from relax_hpc.telemetry.timers import Timers
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


class Sent:
    def wait(self, deadline, give_up=None):
        pass


class Outgoing:
    skipped = ()

    def send(self, wire):
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
    assert diary[:3] == ["new pause", "new learn", "old pause"]
    assert sorted(diary[3:5]) == ["new prepare", "old prepare"]
    assert sorted(diary[5:]) == ["new receive", "old receive"]
    assert taught == {("new", "1"), ("old", "1")}
    diary.clear()
    assert sent(group)[1] == ["pause", "wire"]
    assert sorted(diary[:2]) == ["new pause", "old pause"]


@pytest.mark.parametrize("taught", [set(), {("a", "1"), ("b", "1")}])
def test_where_all_or_none_are_new_nobody_learns_ahead(taught):
    diary = list[str]()
    group, _ = group_of(["a", "b"], taught, diary)
    assert sent(group)[1] == ["pause", "prepare", "wire"]
    assert not [line for line in diary if "learn" in line]


def test_a_newcomer_that_cannot_learn_is_named_and_nobody_else_was_paused():
    diary = list[str]()
    group, engines = group_of(["new", "old"], {("old", "1")}, diary)
    engines[member("new")].fails = "learn"
    with pytest.raises(MemberError) as error:
        sent(group)
    assert error.value.reasons == {member("new"): "no"}
    assert diary == ["new pause", "new learn"]
