"""What runs inside SGLang at an update, with a model and a trainer of this process."""

import uuid
import weakref

import pytest
import torch
from torch import nn

from relax_hpc.comm.broadcast import BroadcastGroup
from relax_hpc.comm.bucket import BucketPlan, Spec
from relax_hpc.comm.orders import PLAN, Order, Receipt, key_of
from relax_hpc.comm.torch_store import open_store
from relax_hpc.engines.sglang import receive

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
            bucket = receive._receivers[self.name].source.bucket(index)
            bucket.copy_(value.view(torch.uint8))
        serial = uuid.uuid4().hex
        order = Order(serial, self.name, task, 10.0)
        receive.receive(model, [(order.to_json(), None)])
        return Receipt.from_json(self.group.take(key_of(serial, 0), timeout_s=1)).error


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
