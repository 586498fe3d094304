"""Beside SGLang's scheduler: tensors that are made once, requests that stand still meanwhile."""

import asyncio
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from relax_hpc.inference.sglang.receive import let_step_end, renew_filters
from relax_hpc.inference.sglang.recent_tensors import RecentTensors

SIZE = 40


def key_of(number):
    return number.to_bytes(16, "big")


class Asked:
    """Counts what is made, which it may hold up."""

    def __init__(self, most):
        self.kept, self.made, self.gates = RecentTensors(most * SIZE), [], {}

    def of(self, number, size=SIZE):
        return self.kept.of(key_of(number), partial(self._make, number, size))

    def _make(self, number, size):
        self.made.append(number)
        if gate := self.gates.get(number):
            assert gate.wait(20)
        return torch.full((size,), number % 256, dtype=torch.uint8)

    def are_kept(self):
        return [int.from_bytes(key, "big") for key in self.kept._kept]

    def is_counted(self):
        return self.kept._bytes == sum(each.nbytes for each in self.kept._kept.values())


async def test_what_was_asked_for_longest_ago_goes_first_and_one_beyond_the_bound_is_kept_alone():
    asked = Asked(most=2)
    for number in (1, 2, 1, 3):
        await asked.of(number)
    assert asked.are_kept() == [1, 3] and asked.made == [1, 2, 3]
    await asked.of(4, size=3 * SIZE)
    assert asked.are_kept() == [4] and asked.is_counted()


async def test_one_who_hangs_up_takes_it_from_nobody():
    """Also where it is the first, or the only one, who asked."""
    asked = Asked(most=2)
    asked.gates[1] = threading.Event()
    first, sibling = asyncio.create_task(asked.of(1)), asyncio.create_task(asked.of(1))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    asked.gates[1].set()
    assert (await sibling)[0] == 1 and asked.made == [1]
    asked.gates[2] = threading.Event()
    only = asyncio.create_task(asked.of(2))
    await asyncio.sleep(0)
    only.cancel()
    with pytest.raises(asyncio.CancelledError):
        await only
    asked.gates[2].set()
    assert (await asked.of(2))[0] == 2 and asked.made == [1, 2] and asked.is_counted()


async def test_who_brings_the_contents_does_not_fail_with_one_who_named_a_file_that_is_not_there():
    """An engine on another node is asked by files, and then with what is in them."""
    asked, gate = Asked(most=2), threading.Event()

    def missing():
        assert gate.wait(20)
        raise ValueError("not on this node")

    bare = [asyncio.create_task(asked.kept.of(key_of(1), missing)) for _ in range(2)]
    await asyncio.sleep(0)
    whole = [asyncio.create_task(asked.of(1)) for _ in range(2)]
    await asyncio.sleep(0)
    gate.set()
    first, second, third, fourth = await asyncio.gather(*bare, *whole, return_exceptions=True)
    assert str(first) == str(second) == "not on this node"
    assert third[0] == 1 and fourth is third and asked.made == [1] and asked.is_counted()


ALL = 1 << 30


def request(top_k=ALL, top_p=1.0, min_p=0.0, *, finished=False):
    settings = SimpleNamespace(top_k=top_k, top_p=top_p, min_p=min_p)
    return SimpleNamespace(sampling_params=settings, finished=lambda: finished)


class Scheduler:
    """A caller with what makes one known as SGLang's."""

    waiting_queue = ()

    def __init__(self, *requests, need=True):
        flags = SimpleNamespace(
            need_top_k_sampling=need, need_top_p_sampling=need, need_min_p_sampling=need
        )
        self.running_batch = SimpleNamespace(reqs=requests, sampling_info=flags)

    def load_weights(self):
        renew_filters()
        needed = vars(self.running_batch.sampling_info)
        return [name[5:10] for name in needed if needed[name]]  # of need_top_k_sampling


@pytest.mark.parametrize(
    ("requests", "needed"),
    [
        ([request(), request(top_k=1)], ["top_k"]),  # a greedy one that still runs
        ([request(), request(top_k=1, finished=True)], []),
        ([request(top_p=0.9), request(min_p=0.1)], ["top_p", "min_p"]),
        ([], ["top_k", "top_p", "min_p"]),  # an empty batch begins anew by itself
    ],
)
def test_filters_are_those_of_the_requests_that_still_run(requests, needed):
    assert Scheduler(*requests).load_weights() == needed
    assert Scheduler(*requests, need=False).load_weights() == [], "none is turned on"


class Stream:
    """Of a GPU; knows whom it waits for."""

    def __init__(self):
        self.awaited = []

    def wait_stream(self, other):
        self.awaited.append(other)


@pytest.fixture
def current(monkeypatch):
    made = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.awaited.append("all"))
    return made


@pytest.mark.parametrize("known", [{}, {"forward_stream": None}, {"forward_stream": Stream()}])
def test_copies_come_after_the_step_that_was_begun_or_after_all(current, known):
    scheduler = Scheduler()
    vars(scheduler).update(known)
    scheduler.load_weights = lambda self=scheduler: let_step_end()
    scheduler.load_weights()
    let_step_end()  # no scheduler among the callers
    assert current.awaited == [known.get("forward_stream") or "all", "all"]
