"""Whom the trainer blames when an order fails, and how soon; members and their ranks are made up.

As with NCCL: nobody's broadcast ends unless all take part, and whoever waits looks at a key.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial

import pytest
from torch.distributed import DistError

from relax_hpc.comm.orders import Order, Receipt, key_of
from relax_hpc.comm.patience import GIVEN_UP, Patience
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import EngineError
from relax_hpc.fleet.members import Member
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights import exchange
from relax_hpc.weights.exchange import Exchange, MemberError, give_orders
from relax_hpc.weights.group import MemberGroup

SERIAL = "s"


class Shelf(dict):
    """What trainer and ranks leave for each other; also a store, as ranks see it."""

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


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setattr(exchange, "_GRACE_S", 0.5)
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


def member(name, num_ranks=1):
    return Member(name, "1", "", num_ranks, "sglang", "HEALTHY")


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
    answers = give_orders(threads, members, orders, 1, shelf, ranks)
    start = time.monotonic()
    deadline = start + timeout_s
    with pytest.raises(MemberError) as error:
        Exchange(timeout_s).carry_out(SERIAL, answers, partial(transfer, deadline), deadline, shelf)
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


def test_where_all_gave_up_they_are_blamed(threads, shelf):
    acts = {"a": lambda _: shelf.tell(0, GIVEN_UP)}
    assert blamed(threads, shelf, acts)[0] == {"a": GIVEN_UP}


def test_of_ranks_of_an_engine_the_one_that_failed_says_why(threads, shelf):
    def act(_):
        shelf.tell(0, GIVEN_UP)
        shelf.tell(1, "ValueError: no place")

    assert blamed(threads, shelf, {"a": act}, num_ranks=2)[0] == {"a": "ValueError: no place"}


def test_a_rank_that_leaves_no_receipt_has_failed(threads, shelf):
    reasons, seconds = blamed(threads, shelf, {"a": lambda _: None})
    assert reasons == {"a": "a rank did not say what it did"}
    assert seconds < 10


class Engine(Rank):
    """One whose order comes late: others stood still before."""

    def pause(self):
        time.sleep(0.2)


def test_ranks_wait_longer_than_the_trainer_who_finds_out_whom_all_wait_for(threads, shelf, hung):
    """Else those that do what they should would be the first to say that they are late."""

    class Outgoing:
        skipped = ()

        def send(self, wire, wait):
            class Sent:
                def wait(self, deadline, give_up):
                    never_ends(deadline, give_up)

            yield Sent()

    engines = {
        member("a"): Engine(partial(waits, shelf, 1)),
        member("b"): Engine(lambda _: hung.wait(60)),
    }
    group = MemberGroup(engines, "g", shelf, WeightsConfig(timeout_s=1), threads, set())
    group._is_prepared = True
    with pytest.raises(MemberError) as error:
        group.send(1, Outgoing(), Timers(), check=False)
    assert [each.id for each in error.value.reasons] == ["b"]
