"""What runs inside SGLang at an update, with a model and a trainer of this process."""

import uuid
import weakref

import pytest
import torch
from torch import nn

from relax_hpc.inference.sglang import receive
from relax_hpc.runtime.comm.bucket import BucketPlan, Spec
from relax_hpc.runtime.comm.orders import GIVEN_UP, PLAN, Order, Receipt, abort_key, key_of
from relax_hpc.runtime.comm.torch_group import BroadcastGroup, open_store

SPECS = [Spec("a", torch.float32, (2, 3)), Spec("b", torch.float32, (4,))]


class Model(nn.Module):
    """Counts how often its loader is run."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))
        self.loaded = 0

    def load_weights(self, tensors):
        self.loaded += 1
        for name, tensor in tensors:
            getattr(self, name).data.copy_(tensor)


class Trainer:
    """Speaks to the one engine of this process; it sends what it wrote where that will arrive."""

    def __init__(self, plan):
        self.store = open_store("127.0.0.1", 1, timeout_s=10)
        self.name = f"test-{uuid.uuid4().hex[:6]}"
        self.group = BroadcastGroup(
            "127.0.0.1", self.store.port, 0, 1, self.name, "gloo", store=self.store, timeout_s=10
        )
        self.group.put(PLAN, plan.to_json())

    def give(self, model, task, values=()):
        for index, value in enumerate(values):
            bucket = self.source.bucket(index)
            bucket.copy_(value.view(torch.uint8))
        self.serial = uuid.uuid4().hex
        order = Order(self.serial, self.name, task, 10.0)
        receive.receive(model, [(order.to_json(), None)])
        return Receipt.from_json(self.group.take(key_of(self.serial, 0), timeout_s=1)).error

    @property
    def source(self):
        """Where the engine takes buckets from."""
        return receive._receivers[self.name].source

    def has_ended(self):
        return self.group.raw.check([abort_key(self.serial)])

    def end(self):
        self.group.put(abort_key(self.serial), "")


@pytest.fixture(autouse=True)
def _forgotten():
    receive._receivers.clear()
    yield
    receive._receivers.clear()


def test_another_trainer_that_sends_the_same_finds_the_places_known():
    model, plan = Model(), BucketPlan.of(SPECS, 24)
    for trainer, offset in ((Trainer(plan), 1.0), (Trainer(plan), 20.0)):
        assert trainer.give(model, "prepare") == ""
        assert model.loaded == 2  # a bucket each, by the first alone
        a, b = torch.arange(6.0) + offset, torch.arange(4.0) - offset
        assert trainer.give(model, "receive", [a, b]) == ""
        assert torch.equal(model.a, a.view(2, 3)) and torch.equal(model.b, b)
    assert model.loaded == 2


def test_one_that_sends_other_buckets_is_watched_anew():
    model = Model()
    first, other = Trainer(BucketPlan.of(SPECS, 24)), Trainer(BucketPlan.of(SPECS, 100))
    assert first.give(model, "prepare") == ""
    assert other.give(model, "prepare") == ""
    assert model.loaded == 3  # one bucket more
    assert other.give(model, "receive", [torch.arange(10.0)]) == ""
    assert torch.equal(model.b, torch.arange(6.0, 10.0))


def test_parameters_that_were_made_anew_are_found_again():
    model, plan = Model(), BucketPlan.of(SPECS, 100)
    assert Trainer(plan).give(model, "prepare") == ""
    model.b.data = torch.zeros(4)
    other = Trainer(plan)
    assert other.give(model, "prepare") == ""
    assert other.give(model, "receive", [torch.arange(10.0)]) == ""
    assert torch.equal(model.b, torch.arange(6.0, 10.0)) and model.loaded == 2


def test_buffers_of_another_plan_are_gone_before_new_ones_are_made(monkeypatch):
    model, first = Model(), Trainer(BucketPlan.of(SPECS, 24))
    assert first.give(model, "learn") == ""
    before = weakref.ref(receive._receivers[first.name])
    made = receive.Receiver
    seen = []
    monkeypatch.setattr(receive, "Receiver", lambda *of: seen.append(before()) or made(*of))
    assert Trainer(BucketPlan.of(SPECS, 100)).give(model, "learn") == ""
    assert seen == [None]


def test_a_task_that_it_does_not_know_is_an_error_and_not_done():
    model, trainer = Model(), Trainer(BucketPlan.of(SPECS, 24))
    assert trainer.give(model, "learn") == ""
    assert "KeyError" in trainer.give(model, "dance")


def test_a_rank_that_fails_ends_the_order_for_all_before_it_leaves_the_group():
    model, trainer = Model(), Trainer(BucketPlan.of(SPECS, 24))
    assert trainer.give(model, "learn") == "" and not trainer.has_ended()
    left = []
    trainer.source.abort = lambda: left.append(trainer.has_ended())
    model.b.data = torch.zeros(5)
    assert "b [4] does not fit" in trainer.give(model, "receive", [torch.ones(6), torch.ones(4)])
    assert left == [True]


@pytest.mark.parametrize("by_others", [False, True])
def test_a_wire_that_breaks_when_others_ended_the_order_is_not_the_fault_of_this_rank(by_others):
    model, trainer = Model(), Trainer(BucketPlan.of(SPECS, 24))
    assert trainer.give(model, "learn") == ""

    def fetch(index, order, patience):
        if by_others:
            trainer.end()
        raise RuntimeError("connection reset")

    trainer.source.fetch = fetch
    error = trainer.give(model, "receive", [torch.ones(6), torch.ones(4)])
    assert error.startswith("RuntimeError: connection reset")
    assert error.endswith(GIVEN_UP) == by_others


def test_nothing_is_read_back_from_a_gpu_that_waits_for_a_peer(monkeypatch):

    class Never:
        def query(self):
            trainer.end()
            return False

    model, trainer = Model(), Trainer(BucketPlan.of(SPECS, 24))
    assert trainer.give(model, "learn") == ""
    receive._receivers[trainer.name]._beside = "a stream"
    monkeypatch.setattr(receive, "mark", lambda *_, **__: Never())
    monkeypatch.setattr(receive, "let_step_end", lambda: None)
    monkeypatch.setattr(receive, "fingerprint", lambda flat: pytest.fail("it was read"))
    assert trainer.give(model, "check", [torch.ones(6), torch.ones(4)]).endswith(GIVEN_UP)


def test_features_of_media_are_forgotten_with_the_weights_that_made_them(monkeypatch):
    model, trainer, journal = Model(), Trainer(BucketPlan.of(SPECS, 24)), []
    monkeypatch.setattr(receive, "num_sampled", dict)
    monkeypatch.setattr(receive, "forget", lambda: journal.append(("forgotten", model.b[0].item())))
    tell = receive._tell
    monkeypatch.setattr(receive, "_tell", lambda *told: (journal.append(("told",)), tell(*told)))
    assert trainer.give(model, "learn") == ""
    journal.clear()
    assert trainer.give(model, "receive", [torch.ones(6), 7 * torch.ones(4)]) == ""
    assert journal == [("forgotten", 7.0), ("told",)]
