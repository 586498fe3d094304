"""Who stands still for whom when engines join others, and whom the trainer blames and how soon.

Engines and the wire are made up. As with NCCL, no broadcast ends unless all take part.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

import pytest
from torch.distributed import DistError

from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import EngineError
from relax_hpc.inference.members import Member
from relax_hpc.runtime.comm.bucket import BucketPlan
from relax_hpc.runtime.comm.orders import GIVEN_UP, Order, Patience, Receipt, key_of
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.weights import broadcast, transport
from relax_hpc.weights.broadcast import MemberGroup
from relax_hpc.weights.transport import Exchange, MemberError, Update

SERIAL = "s"


class Shelf(dict):
    """What trainer and ranks leave for each other: a communicator, and a store as ranks see it."""

    is_asynchronous, size = True, 4

    def put(self, key, text):
        self[key] = text

    def take(self, key, *, timeout_s):
        if key not in self:
            raise DistError("nobody left it")
        return self.pop(key)

    def check(self, keys):
        return all(key in self for key in keys)

    def tell(self, rank, error="", serial=SERIAL):
        self[key_of(serial, rank)] = json.dumps(asdict(Receipt(error=error)))

    def close(self):
        self["closed"] = ""


class Outgoing:
    skipped = ()

    def send(self, wire, wait):
        yield SimpleNamespace(wait=lambda deadline, give_up=None: None)

    warm_up = send


class Engine:
    """Answers orders, and writes down in a diary of all what it was asked."""

    def __init__(self, name, rank, wire, diary):
        self.name, self.rank, self.wire, self.diary, self.fails = name, rank, wire, diary, ""

    def note(self, what):
        self.diary.append(f"{self.name} {what}")

    def pause(self):
        self.note("pause")

    def receive_weights(self, orders, *, version):
        [order] = orders
        self.note(order.task)
        if order.task == self.fails:
            raise EngineError("no")
        self.wire.tell(self.rank, serial=order.serial)


def member(name, num_ranks=1):
    return Member(name, "1", "", num_ranks, "sglang", "HEALTHY")


def group_of(names, *taught):
    """A group of these engines, the engines, and what they were asked."""
    wire, diary = Shelf(), list[str]()
    engines = {member(n): Engine(n, rank, wire, diary) for rank, n in enumerate(names, start=1)}
    config = WeightsConfig(advanced={"timeout_s": 20})
    known = {(name, "1") for name in taught}
    return MemberGroup(engines, "g", wire, config, ThreadPoolExecutor(8), known), engines, diary


def sent(group):
    timers = Timers()
    receipts = group.send(Update(1, Outgoing(), timers, check=False))
    return {each.id for each in receipts}, [name.split("/")[1] for name in timers.seconds]


def test_those_who_sample_stand_still_only_once_a_newcomer_knows_its_places():
    group, _, diary = group_of(["new", "old"], "old")
    assert sent(group) == ({"new", "old"}, ["learn", "pause", "prepare", "wire"])
    assert diary[:4] == ["new pause", "new learn", "old pause", "old learn"]
    assert sorted(diary[4:6]) == ["new prepare", "old prepare"]
    assert sorted(diary[6:]) == ["new receive", "old receive"]
    diary.clear()
    assert sent(group)[1] == ["pause", "wire"]
    assert sorted(diary[:2]) == ["new pause", "old pause"]


@pytest.mark.parametrize("taught", [[], ["old"]])
def test_who_cannot_take_the_weights_says_so_before_anybody_uses_the_wire(taught):
    """Where others know their places, nobody else was paused."""
    group, engines, diary = group_of(["new", "old"], *taught)
    engines[member("new")].fails = "learn"
    with pytest.raises(MemberError) as error:
        sent(group)
    assert error.value.reasons == {member("new"): "no"}
    assert not [line for line in diary if "prepare" in line]
    assert diary == ["new pause", "new learn"] or not taught


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
    wire, diary = Shelf(), list[str]()
    monkeypatch.setattr(broadcast, "BroadcastGroup", lambda *_, **__: wire)
    monkeypatch.setattr(broadcast, "open_store", lambda *_, **__: SimpleNamespace(port=1))

    def form(timeout_s, **engines):
        with ThreadPoolExecutor(8) as threads:
            members = {member(n): Joining(n, wire, diary, **how) for n, how in engines.items()}
            plan, config = BucketPlan.of([], 1), WeightsConfig(advanced={"timeout_s": timeout_s})
            try:
                return MemberGroup.form(members, plan, config, "nccl", threads, set())
            finally:
                for opened in [how["opened"] for how in engines.values() if "opened" in how]:
                    opened.set()

    return SimpleNamespace(form=form, wire=wire, diary=diary)


def test_who_does_not_join_in_time_is_blamed_and_nobody_stays_in_the_group(formed):
    with pytest.raises(MemberError) as error:
        formed.form(1, a={}, hung={"opened": threading.Event()})
    assert error.value.reasons == {member("hung"): "did not join the group within 1 s"}
    assert "closed" in formed.wire
    assert sorted(formed.diary) == ["a left", "hung left"]


def test_who_refuses_to_join_is_known_at_once_and_nobody_stays_in_the_group(formed):
    with pytest.raises(MemberError) as error:
        formed.form(60, a={"opened": threading.Event()}, b={"error": EngineError("no")})
    assert error.value.reasons == {member("b"): "no"}
    assert "closed" in formed.wire and "a left" in formed.diary
    formed.wire.clear()
    assert list(formed.form(60, a={}).receivers) == [member("a")]
    assert list(formed.wire) == ["plan"]


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setattr(transport, "_GRACE_S", 0.5)
    return Shelf()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def hung():
    """Lets those go on at last that hang."""
    event = threading.Event()
    yield event
    event.set()


class Rank:
    """An engine whose call does what the test says."""

    def __init__(self, act):
        self.act = act

    def receive_weights(self, orders, *, version):
        self.act(orders[0])


def waits(shelf, rank, order):
    """What a rank does whose broadcast does not end."""
    patience = Patience(order, shelf)
    try:
        while True:
            patience.check()
            time.sleep(0.01)
    except TimeoutError as error:
        shelf.tell(rank, f"TimeoutError: {error}", order.serial)


def never_ends(deadline, give_up):
    """A transfer that somebody does not take part in."""
    while True:
        if time.monotonic() > deadline:
            raise TimeoutError("a broadcast did not end")
        give_up()
        time.sleep(0.01)


def blamed(threads, shelf, acts, timeout_s=30.0, num_ranks=1, transfer=never_ends):
    """Whom, and after how long."""
    members = {member(name, num_ranks): Rank(act) for name, act in acts.items()}
    order = Order(SERIAL, "g", "receive", timeout_s + 5)
    orders = {each: [order] * num_ranks for each in members}
    ranks = {each: range(n * num_ranks, (n + 1) * num_ranks) for n, each in enumerate(members)}
    start = time.monotonic()
    deadline = start + timeout_s
    with pytest.raises(MemberError) as error:
        how = orders, members, 1, ranks, partial(transfer, deadline), deadline, shelf
        Exchange(threads, timeout_s).carry_out(*how)
    return {each.id: why for each, why in error.value.reasons.items()}, time.monotonic() - start


def test_an_engine_that_hangs_is_blamed_alone(threads, shelf, hung):
    acts = {"a": partial(waits, shelf, 0), "b": lambda _: hung.wait(60)}
    acts["c"] = partial(waits, shelf, 2)
    assert blamed(threads, shelf, acts, 0.3)[0] == {"b": "no answer within 0 s"}


def test_an_error_of_a_rank_ends_the_order_at_once_and_is_the_only_one_that_counts(threads, shelf):
    acts = {"a": partial(waits, shelf, 0), "b": lambda _: shelf.tell(1, "OutOfMemoryError")}
    reasons, seconds = blamed(threads, shelf, acts)
    assert reasons == {"b": "OutOfMemoryError"}
    assert seconds < 10


def test_who_gave_up_before_the_cause_is_known_is_not_blamed(threads, shelf):
    def fail(_):
        time.sleep(0.2)
        raise EngineError("gone")

    acts = {"a": lambda _: shelf.tell(0, f"RuntimeError: reset; {GIVEN_UP}"), "b": fail}
    assert blamed(threads, shelf, acts)[0] == {"b": "gone"}


def test_who_says_nothing_when_others_gave_up_is_blamed(threads, shelf, hung):
    acts = {"a": lambda _: shelf.tell(0, GIVEN_UP), "b": lambda _: hung.wait(60)}
    assert blamed(threads, shelf, acts)[0] == {"b": "did not answer when others gave up"}


def test_where_the_wire_breaks_who_is_silent_is_blamed_for_that(threads, shelf, hung):
    def breaks(deadline, give_up):
        raise RuntimeError("remote process exited")

    acts = {"a": partial(waits, shelf, 0), "b": lambda _: hung.wait(60)}
    assert blamed(threads, shelf, acts, transfer=breaks)[0] == {"b": "remote process exited"}


def test_of_ranks_of_an_engine_the_one_that_failed_says_why(threads, shelf):
    def act(_):
        shelf.tell(0, GIVEN_UP)
        shelf.tell(1, "ValueError: no place")

    assert blamed(threads, shelf, {"a": act}, num_ranks=2)[0] == {"a": "ValueError: no place"}


def test_ranks_wait_longer_than_the_trainer_who_finds_out_whom_all_wait_for(threads, shelf, hung):

    class Unending(Outgoing):
        def send(self, wire, wait):
            yield SimpleNamespace(wait=never_ends)

    class LateRank(Rank):
        """One whose order comes late: others stood still before."""

        def pause(self):
            time.sleep(0.2)

    acts = {"a": partial(waits, shelf, 1), "b": lambda _: hung.wait(60)}
    engines = {member(name): LateRank(act) for name, act in acts.items()}
    config = WeightsConfig(advanced={"timeout_s": 1})
    group = MemberGroup(engines, "g", shelf, config, threads, set())
    group._is_prepared = True
    with pytest.raises(MemberError) as error:
        group.send(Update(1, Unending(), Timers(), check=False))
    assert [each.id for each in error.value.reasons] == ["b"]
