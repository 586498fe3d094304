"""Flat buckets on their way out, and where an engine puts what is in them."""

import uuid
import weakref

import pytest
import torch
from torch import nn

from relax_hpc.inference.sglang import receive
from relax_hpc.inference.sglang.copies import (
    MisfitError,
    NotPureError,
    find_left_over,
    find_uncovered,
    record,
)
from relax_hpc.runtime.comm.bucket import BucketPlan, Spec, fingerprint, views
from relax_hpc.runtime.comm.orders import GIVEN_UP, PLAN, Order, Receipt, abort_key, key_of
from relax_hpc.runtime.comm.torch_group import BroadcastGroup, open_store
from relax_hpc.weights.staging import Buffers, Outgoing


class Wire:
    """A group whose broadcasts arrive at once."""

    is_asynchronous = False

    def __init__(self):
        self.sent = []

    def start(self, flat):
        self.sent.append(flat.clone())
        return self

    def order_after(self):
        pass


class Gathered:
    """Buckets that are brought together elsewhere."""

    def __init__(self, buckets):
        self.buckets, self.filled = buckets, []

    def begin(self):
        pass

    def fill(self, index, flat):
        flat.copy_(self.buckets[index])
        self.filled.append(index)


def model():
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in (("a", (4, 3)), ("b", (2, 3)), ("c", (5,)), ("d", (6, 2)))
    }


def plan_of(tensors, max_bytes, fixed=""):
    specs = [Spec(n, t.dtype, tuple(t.shape), n not in fixed) for n, t in tensors.items()]
    return BucketPlan.of(specs, max_bytes)


def test_a_plan_keeps_the_order_and_the_limit_and_survives_its_own_text():
    plan = plan_of(model(), 80)
    assert [[spec.name for spec in bucket] for bucket in plan.buckets] == [["a", "b"], ["c", "d"]]
    assert plan.sizes == [72, 68]
    assert plan_of(model(), 72) == plan  # what fits exactly is not cut
    assert BucketPlan.from_json(plan.to_json()) == plan
    assert plan_of(model(), 100).hash != plan.hash  # the cut counts, too
    assert [len(bucket) for bucket in plan_of(model(), 1).buckets] == [1, 1, 1, 1]


@pytest.mark.parametrize("count", [1, 2, 9])
def test_what_is_sent_are_the_tensors_whether_they_come_one_by_one_or_gathered(count):
    tensors = model()
    plan = plan_of(tensors, 50)
    expected = [
        torch.cat([tensors[s.name].flatten() for s in bucket]).view(torch.uint8)
        for bucket in plan.buckets
    ]
    buffers = Buffers(plan, torch.device("cpu"), count=count)
    for gather in (None, Gathered(expected)):
        wire = Wire()
        outgoing = Outgoing(buffers, iter(tensors.items()), gather, fingerprints=True)
        outgoing.prefetch()
        for _ in outgoing.send(wire):
            pass
        assert all(map(torch.equal, wire.sent, expected))
        assert outgoing.fingerprints == [fingerprint(flat) for flat in expected]
    assert gather.filled == [*range(len(plan.buckets))]


@pytest.mark.parametrize("fixed", ["", "a", "b", "ac", "bcd"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_buffer_is_filled_again_only_when_it_has_left(count, fixed):
    """Bytes on the wire are read as late as may be: when somebody waits for them."""

    class SlowWire(Wire):
        def start(self, flat):
            under_way = SlowWire()
            under_way.flat, under_way.sent = flat, self.sent
            return under_way

        def order_after(self):
            if self.flat is not None:
                self.sent.append(self.flat.clone())
            self.flat = None

    plan, wire = plan_of(model(), 1, fixed), SlowWire()
    buffers = Buffers(plan, torch.device("cpu"), count=count)
    whole = [tensor.flatten().view(torch.uint8) for tensor in model().values()]
    expected = [flat for name, flat in zip("abcd", whole, strict=True) if name not in fixed]
    for gather in (None, Gathered(whole)):
        wire.sent.clear()
        outgoing = Outgoing(buffers, iter(model().items()), gather, skipped=plan.fixed)
        outgoing.prefetch()
        for sending in list(outgoing.send(wire)):
            sending.order_after()
        assert sorted(map(bytes, wire.sent)) == sorted(map(bytes, expected))
        assert outgoing.num_bytes == sum(flat.nbytes for flat in expected)
    assert gather.filled == ["abcd".index(name) for name in "abcd" if name not in fixed]


@pytest.mark.parametrize("read_back", [{}, {"fingerprints": True}])
def test_who_reads_back_what_it_fills_waits_for_the_wire_as_it_is_told(read_back):
    """A GPU's stream that waits for a peer blocks whoever reads from it; nobody looks at limits."""

    class Sent:
        def order_after(self):
            waits.append("on the stream")

    wire, waits = Wire(), []
    wire.start = lambda flat: Sent()
    plan = plan_of(model(), 1)
    given = Buffers(plan, torch.device("cpu"), count=2), iter(model().items())
    outgoing = Outgoing(*given, **read_back)
    for _ in outgoing.send(wire, lambda sent: waits.append("on the host")):
        pass
    assert waits == ["on the host" if read_back else "on the stream"] * (len(plan.buckets) - 2)


def test_what_learns_and_what_does_not_are_never_in_one_bucket():
    plan = plan_of(model(), 80, "bc")
    assert [[spec.name for spec in bucket] for bucket in plan.buckets] == [["a"], ["b", "c"], ["d"]]
    assert plan.fixed == (1,) and plan_of(model(), 80).fixed == ()


def test_what_was_not_sent_is_taken_all_the_same():
    taken, buffers = [], Buffers(plan_of(model(), 50), torch.device("cpu"), count=2)
    Outgoing(buffers, (taken.append(each[0]) or each for each in model().items())).drain()
    assert taken == ["a", "b", "c", "d"]
    gather = Gathered([torch.zeros(size, dtype=torch.uint8) for size in (48, 44, 48)])
    outgoing = Outgoing(buffers, (), gather)
    outgoing.prefetch()
    outgoing.drain()
    assert gather.filled == [0, 1, 2]


def test_a_fingerprint_sees_every_byte_and_its_place():
    flat = torch.arange(77, dtype=torch.uint8)
    base = fingerprint(flat)
    for place in range(77):
        changed = flat.clone()
        changed[place] ^= 1
        assert fingerprint(changed) != base
    swapped = flat.clone()
    swapped[:8], swapped[8:16] = flat[8:16], flat[:8].clone()
    assert fingerprint(swapped) != base
    # By hand: one word of value 1 at place 0 counts (0 | 1) x 1.
    assert fingerprint(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0], dtype=torch.uint8)) == 1


class Engine(nn.Module):
    """Stores q and k in one matrix, of which a rank of two has half, as SGLang does."""

    def __init__(self, scaled=False):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.scaled, self.num_calls = scaled, 0

    def load_weights(self, weights):
        self.num_calls += 1
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor * 2 if self.scaled else tensor)
            elif name in "qk":
                start = 2 * "qk".index(name)
                self.qk.data.narrow(0, start, 2).copy_(tensor.narrow(0, 2, 2))


BUCKET = [Spec("q", torch.float32, (4, 3)), Spec("k", torch.float32, (4, 3))]


def test_a_loader_is_watched_without_writing_and_its_copies_can_be_made_without_it():
    engine, flat = Engine(), torch.rand(24).view(torch.uint8)
    copies = record(engine.load_weights, flat, BUCKET)
    assert not engine.qk.any()
    assert find_uncovered(engine, copies.targets) == ["norm"]
    for _ in range(2):
        flat.view(torch.float32).uniform_()
        copies.make()
        q, k = views(flat, BUCKET)
        assert torch.equal(engine.qk, torch.cat([q[2:], k[2:]]))
        assert copies.differing() == 0
    engine.qk.data[3, 1] = float("nan")
    assert copies.differing() == 1  # slices, of which k's is wrong
    assert engine.num_calls == 1


def test_a_tensor_that_a_loader_passes_over_is_named():
    engine = Engine()

    def load_known(tensors):
        engine.load_weights((name, tensor) for name, tensor in tensors if name in "qk")

    strangers = [Spec("x", torch.float32, (2,)), *BUCKET, Spec("y", torch.float32, (5,))]
    flat = torch.rand(31).view(torch.uint8)
    assert find_left_over(record(load_known, flat, strangers), flat, strangers) == ["x", "y"]
    assert find_left_over(record(load_known, flat[:96], BUCKET), flat, BUCKET) == []


def test_a_tensor_that_a_loader_fails_at_is_named():
    wrong = [Spec("q", torch.float32, (4, 3)), Spec("k", torch.float32, (3, 4))]
    with pytest.raises(MisfitError, match=r"^k \[3, 4\] does not fit \(RuntimeError: "):
        record(Engine().load_weights, torch.rand(24).view(torch.uint8), wrong)


def test_a_loader_that_computes_is_not_taken_for_one_that_copies():
    cast = Engine()
    cast.norm = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)
    norm = [Spec("norm", torch.float32, (3,))]
    for engine, said in ((Engine(scaled=True), "mul"), (cast, "bfloat16")):
        with pytest.raises(NotPureError, match=said):
            record(engine.load_weights, torch.rand(3).view(torch.uint8), norm)


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
            self.source.bucket(index).copy_(value.view(torch.uint8))
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
    assert "KeyError" in other.give(model, "dance"), "a task that it does not know"


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
    before, made, seen = weakref.ref(receive._receivers[first.name]), receive.Receiver, []
    monkeypatch.setattr(receive, "Receiver", lambda *of: seen.append(before()) or made(*of))
    assert Trainer(BucketPlan.of(SPECS, 100)).give(model, "learn") == ""
    assert seen == [None]


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
