"""Requests of SGLang that are looked at while they stand still; its scheduler is made up here."""

from types import SimpleNamespace

import pytest
import torch

from relax_hpc.engines.sglang.in_flight import let_step_end, renew_filters

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
        ([request(), request()], []),
        ([request(), request(top_k=1)], ["top_k"]),  # a greedy one that still runs
        ([request(), request(top_k=1, finished=True)], []),
        ([request(top_p=0.9), request(min_p=0.1)], ["top_p", "min_p"]),
        ([], ["top_k", "top_p", "min_p"]),  # an empty batch begins anew by itself
    ],
)
def test_filters_are_those_of_the_requests_that_still_run(requests, needed):
    assert Scheduler(*requests).load_weights() == needed


def test_a_filter_that_nobody_asked_for_is_not_turned_on():
    assert Scheduler(request(top_k=5), need=False).load_weights() == []


def test_an_sglang_that_keeps_its_requests_in_another_way_is_left_alone(caplog):
    scheduler = Scheduler(request())
    del scheduler.running_batch.sampling_info.need_top_k_sampling
    scheduler.load_weights()
    assert "cannot be told" in caplog.text


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


def test_copies_come_after_the_step_that_was_begun(current):
    scheduler = Scheduler()
    scheduler.forward_stream = Stream()
    scheduler.load_weights = lambda self=scheduler: let_step_end()
    scheduler.load_weights()
    assert current.awaited == [scheduler.forward_stream]


@pytest.mark.parametrize("known", [{}, {"forward_stream": None}])
def test_without_the_stream_of_steps_all_are_waited_for(current, known):
    scheduler = Scheduler()
    vars(scheduler).update(known)
    scheduler.load_weights = lambda self=scheduler: let_step_end()
    scheduler.load_weights()
    let_step_end()  # no scheduler among the callers
    assert current.awaited == ["all", "all"]
