"""Flat buckets on their way out, and how an engine learns where their contents belong."""

import pytest
import torch
from torch import nn

from relax_hpc.inference.sglang.copies import (
    MisfitError,
    NotPureError,
    find_left_over,
    find_uncovered,
    record,
)
from relax_hpc.runtime.comm.bucket import BucketPlan, Spec, fingerprint, views
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
    assert plan_of(model(), 71) != plan
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


@pytest.mark.parametrize("read_back", [{}, {"fingerprints": True}, {"digest": True}])
def test_who_reads_back_what_it_fills_waits_for_the_wire_as_it_is_told(read_back):
    """A GPU's stream that waits for a peer blocks whoever reads from it; nobody looks at limits."""

    class Sent:
        def order_after(self):
            waits.append("on the stream")

    wire, waits = Wire(), []
    wire.start = lambda flat: Sent()
    plan = plan_of(model(), 1)
    buffers = Buffers(plan, torch.device("cpu"), count=2)
    outgoing = Outgoing(buffers, iter(model().items()), **read_back)
    for _ in outgoing.send(wire, lambda sent: waits.append("on the host")):
        pass
    assert waits == ["on the host" if read_back else "on the stream"] * (len(plan.buckets) - 2)


def test_what_learns_and_what_does_not_are_never_in_one_bucket():
    plan = plan_of(model(), 80, "bc")
    assert [[spec.name for spec in bucket] for bucket in plan.buckets] == [["a"], ["b", "c"], ["d"]]
    assert plan.fixed == (1,) and plan_of(model(), 80).fixed == ()
    received = BucketPlan.from_json(plan.to_json())
    assert received.sizes == plan.sizes, "engines see the same cut"


def test_what_was_not_sent_is_taken_all_the_same():
    taken = []
    outgoing = Outgoing(
        Buffers(plan_of(model(), 50), torch.device("cpu"), count=2),
        (taken.append(name) or (name, tensor) for name, tensor in model().items()),
    )
    outgoing.drain()
    assert taken == ["a", "b", "c", "d"]
    gather = Gathered([torch.zeros(size, dtype=torch.uint8) for size in (48, 44, 48)])
    outgoing = Outgoing(Buffers(plan_of(model(), 50), torch.device("cpu"), count=2), (), gather)
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
NORM = [Spec("norm", torch.float32, (3,))]


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
    with pytest.raises(NotPureError, match="mul"):
        record(Engine(scaled=True).load_weights, torch.rand(3).view(torch.uint8), NORM)
    engine = Engine()
    engine.norm = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)
    with pytest.raises(NotPureError, match="bfloat16"):
        record(engine.load_weights, torch.rand(3).view(torch.uint8), NORM)
