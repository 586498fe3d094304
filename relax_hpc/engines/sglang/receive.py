"""Runs inside SGLang: receives a version of the weights in one call.

SGLang calls `receive` as a `--custom-weight-loader`, in every rank of an engine, between two
steps. What is to be done stands in the name of the one "tensor" it is given; what is to be
received, the trainer has left in a store, and there the answer goes, too. Buckets come by broadcast
or, from a trainer on the same GPU, through memory that both map. Two buffers: while one is copied
to its places, the next bucket arrives.

No exception leaves it, for that would end the engine: a failure is told to the trainer, which then
fences the engine.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world

from relax_hpc.comm.broadcast import Transfer, start_broadcast
from relax_hpc.comm.bucket import BucketPlan, Spec, fingerprint
from relax_hpc.comm.lanes import Taker
from relax_hpc.comm.orders import PLAN, Order, Receipt, key_of, receipt_file
from relax_hpc.comm.patience import Patience
from relax_hpc.comm.streams import has_happened, mark, new_stream
from relax_hpc.engines.sglang import features
from relax_hpc.engines.sglang.compare import compare
from relax_hpc.engines.sglang.copies import (
    Copies,
    LoadWeights,
    MisfitError,
    NotPureError,
    left_over,
    load,
    record,
    scales_are_converted,
    uncovered,
)
from relax_hpc.engines.sglang.in_flight import let_step_end, num_sampled, renew_filters
from relax_hpc.records import write_json

log = logging.getLogger(__name__)

_BUFFERS = 2


def receive(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """See the top of this file."""
    [(text, _)] = named_tensors
    order = Order(**json.loads(text))
    if order.task in ("compare", "count"):
        _report(model, order)
        return
    key = order.group or order.store
    begins = order.task in ("learn", "prepare")
    receiver = None if begins else _receivers.get(key)
    try:
        source = receiver.source if receiver else _source(order, model)
    except (RuntimeError, StopIteration):  # nobody to tell; the trainer misses the receipt
        log.exception("the trainer that gives orders is not to be found")
        return
    try:
        if receiver is None:
            known = list(_receivers.values())
            _receivers.clear()  # there is one trainer
            followed = next((each for each in known if each.follow(source)), None)
            receiver = _receivers[key] = followed or Receiver(model, source)
        receipt = receiver.do(order, Patience(order, source.store))
        if not begins:
            receipt.num_sampled = num_sampled()
            features.forget()
            renew_filters()
    except (RuntimeError, OSError, ValueError, KeyError, AssertionError) as error:
        log.exception("weights of the trainer were not received")
        _receivers.pop(key, None)
        receipt = Receipt(error=f"{type(error).__name__}: {error}")
    try:
        source.store.set(key_of(order.serial, source.rank), json.dumps(asdict(receipt)))
    except dist.DistError:
        log.exception("the trainer is gone; the weights are undefined")


def _report(model: nn.Module, order: Order) -> None:
    """Answers an order that comes after weights were loaded from files."""
    features.forget()
    try:
        receipt = compare(model, Path(order.folder)) if order.task == "compare" else Receipt()
        receipt.num_sampled = num_sampled()
        renew_filters()
    except (RuntimeError, ValueError, OSError) as error:
        log.exception("weights could not be compared with %s", order.folder)
        receipt = Receipt(error=f"{type(error).__name__}: {error}")
    try:
        write_json(receipt_file(order.folder, order.serial, dist.get_rank()), asdict(receipt))
    except OSError:
        log.exception("the trainer is not told")


class Source(Protocol):
    """The sender of buckets."""

    store: dist.Store
    """Store for messages besides the buckets."""
    rank: int
    """Number under which this rank leaves receipts."""
    plan: BucketPlan

    def bucket(self, index: int) -> Tensor:
        """[size] uint8, where bucket `index` is once it has arrived."""
        ...

    def take_over(self, other: "Source") -> bool:
        """Goes on in the buffers of another one, if the same arrives in them; returns whether."""
        ...

    def warm_up(self, patience: Patience) -> None:
        """Does once what takes longer the first time."""
        ...

    def fetch(self, index: int, order: Order, patience: Patience) -> None:
        """Bucket `index` is there for what the current stream is given from here on."""
        ...

    def free(self, index: int, order: Order) -> None:
        """Nothing that the current stream is given from here on reads bucket `index`."""
        ...

    def abort(self) -> None:
        """Ends what the GPU, or the trainer, waits for."""
        ...


class BroadcastSource:
    """A weight group that SGLang has joined."""

    def __init__(self, order: Order, device: torch.device) -> None:
        self._group, self.store = _find(order.group)
        self.rank = self._group.rank()
        self.store.wait([PLAN], timedelta(seconds=order.timeout_s))
        self.plan = BucketPlan.from_json(self.store.get(PLAN).decode())
        self._device, self._stream = device, new_stream(device)
        self._free = dict[int, torch.cuda.Event]()
        """Buffer -> when what was in it has been made use of."""

    def bucket(self, index: int) -> Tensor:
        return self._flat[index % len(self._flat)][: self.plan.sizes[index]]

    def take_over(self, other: Source) -> bool:
        if not isinstance(other, BroadcastSource) or other.plan != self.plan:
            return False
        self._flat = other._flat
        return True

    def warm_up(self, patience: Patience) -> None:
        """Uses the wire once, so that the first update is as fast as the others."""
        self._wait(start_broadcast(self._group, self.bucket(0)), patience)

    def fetch(self, index: int, order: Order, patience: Patience) -> None:
        if self._stream is None:
            self._wait(start_broadcast(self._group, self.bucket(index)), patience)
            return
        if free := self._free.get(index % len(self._flat)):
            self._stream.wait_event(free)
        with torch.cuda.stream(self._stream):
            start_broadcast(self._group, self.bucket(index)).order_after()
        torch.cuda.current_stream().wait_stream(self._stream)

    def free(self, index: int, order: Order) -> None:
        if self._stream:
            self._free[index % len(self._flat)] = mark()

    def abort(self) -> None:
        self._group.abort()

    @cached_property
    def _flat(self) -> list[Tensor]:
        return self.plan.buffers(min(_BUFFERS, len(self.plan.buckets)), self._device)

    def _wait(self, transfer: Transfer, patience: Patience) -> None:
        transfer.wait(patience.deadline, patience.check)


class LaneSource:
    """Memory of the trainer's rank on this GPU."""

    def __init__(self, order: Order, device: torch.device) -> None:
        self._taker = Taker(order, device)
        self.store, self.rank = self._taker.store.shelf, order.lane
        self.plan, self._serial = self._taker.plan, ""

    def bucket(self, index: int) -> Tensor:
        return self._taker.bucket(index)

    def take_over(self, other: Source) -> bool:
        """Never: the memory is another trainer's."""
        return False

    def warm_up(self, patience: Patience) -> None:
        """The memory is mapped already."""

    def fetch(self, index: int, order: Order, patience: Patience) -> None:
        self._serial = order.serial
        self._taker.wait_for(index, order, patience)

    def free(self, index: int, order: Order) -> None:
        self._taker.give_back(index, order)

    def abort(self) -> None:
        """The trainer's rank waits for this one, and all of the trainer for that rank."""
        self._taker.give_up(self._serial)


def _source(order: Order, model: nn.Module) -> Source:
    device = next(model.parameters()).device
    return BroadcastSource(order, device) if order.group else LaneSource(order, device)


class Receiver:
    """A rank of an engine, and where its weights come from."""

    def __init__(self, model: nn.Module, source: Source) -> None:
        self.source = source
        self._model = model
        self._load_weights: LoadWeights = getattr(model, "load_weights")  # noqa: B009
        self._beside = new_stream(next(model.parameters()).device)
        if scales_are_converted(model):
            raise ValueError(
                "SGLang keeps scales of FP8 as powers of two for DeepGEMM; "
                "start it with engines.rollout.args.fp8_gemm_backend = 'triton'"
            )
        self._loads, self._fallback = self._recorded()
        self._places = self._addresses()

    def follow(self, source: Source) -> bool:
        """Goes on with another source, if what is known of the places holds; returns whether.

        To find them takes seconds where there are thousands of experts, and all engines stand still
        for it. A trainer that came back, or a group that an engine has joined, sends the same.
        """
        if not source.take_over(self.source):
            return False
        self.source = source
        return True

    def do(self, order: Order, patience: Patience) -> Receipt:
        """Carries an order out; what is to be learnt was learnt when this was made."""
        tasks = {"prepare": self.prepare, "receive": self.receive, "check": self.check}
        if task := tasks.get(order.task):
            return task(order, patience)
        return Receipt(fallback=self._fallback)

    def prepare(self, order: Order, patience: Patience) -> Receipt:
        """Does once what takes longer the first time."""
        with self._abort_on_error():
            self.source.warm_up(patience)
        return Receipt(fallback=self._fallback)

    def receive(self, order: Order, patience: Patience) -> Receipt:
        """Receives all buckets and puts their contents where they belong."""
        return self._run(order, patience, lambda index: self._loads[index]())

    def check(self, order: Order, patience: Patience) -> Receipt:
        """The same, and tells what came and whether it is where it belongs."""
        fingerprints, differing = list[int](), list[int]()

        def load(index: int) -> None:
            self._loads[index]()
            fingerprints.append(fingerprint(self.source.bucket(index)))
            copies = self._copies.get(index)
            differing.append(copies.differing() if copies else 0)

        receipt = self._run(order, patience, load)
        receipt.fingerprints, receipt.differing = fingerprints, sum(differing)
        return receipt

    def _run(self, order: Order, patience: Patience, load: Callable[[int], None]) -> Receipt:
        if self._places != self._addresses():  # parameters were made anew
            self._loads, self._fallback = self._recorded()
            self._places = self._addresses()
        clock, skipped = _Clock(self._beside), set(order.skipped)
        coming = [n for n in range(len(self.source.plan.buckets)) if n not in skipped]
        with self._abort_on_error():
            for index in coming:
                self.source.fetch(index, order, patience)
                if index == coming[-1]:
                    clock.received()
                load(index)
                self.source.free(index, order)
            return clock.receipt(self._fallback, patience)

    @contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, TimeoutError):
            self.source.abort()
            raise

    def _recorded(self) -> tuple[list[Callable[[], Any]], list[str]]:
        """Returns a loader for every bucket, and why some of them are loaded the slow way."""
        self._copies: dict[int, Copies] = {}
        reasons = []
        for index, bucket in enumerate(self.source.plan.buckets):
            try:
                flat = self.source.bucket(index)
                self._copies[index] = record(self._load_weights, flat, bucket)
            except NotPureError as error:
                reasons.append(f"{bucket[0].name} and on: {error}")
        targets = (target for copies in self._copies.values() for target in copies.targets)
        if missing := uncovered(self._model, targets) if not reasons else []:
            self._check_names(missing)
            reasons.append(f"nothing is known to be copied to {', '.join(missing[:3])}")
            self._copies = {}
        loads: list[Callable[[], Any]] = [
            self._copies[index].make if index in self._copies else self._loader(index, bucket)
            for index, bucket in enumerate(self.source.plan.buckets)
        ]
        return loads, reasons

    def _check_names(self, missing: list[str]) -> None:
        """SGLang's loaders pass over a name that they do not know, and leave its place as it was.

        A rank has no place for the experts of others, so tensors of these may well be left over.
        """
        unknown = [
            name
            for index, bucket in enumerate(self.source.plan.buckets)
            for name in left_over(self._copies[index], self.source.bucket(index), bucket)
            if ".experts." not in name
        ]
        if unknown:
            raise MisfitError(
                f"the model has no place for {', '.join(unknown[:3])}, and is sent nothing for "
                f"{', '.join(missing[:3])}"
            )

    def _loader(self, index: int, bucket: tuple[Spec, ...]) -> Callable[[], Any]:
        return lambda: load(self._load_weights, self.source.bucket(index), bucket)

    def _addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._model.parameters()]


class _Clock:
    """Times an update on the host or, where copies are asynchronous, on the GPU.

    What the current stream does after its making comes after the step that the engine was in; the
    first buckets arrive meanwhile.
    """

    def __init__(self, beside: torch.cuda.Stream | None) -> None:
        """`beside` is a stream of the GPU that has nothing to do, if there is a GPU."""
        self._start = self._received = time.perf_counter()
        self._is_cuda = beside is not None
        if beside is not None:
            self._first = mark(beside, timed=True)
            let_step_end()
            self._free = self._last = mark(timed=True)

    def received(self) -> None:
        """The last bucket is there for what the current stream does next."""
        self._received = time.perf_counter()
        if self._is_cuda:
            self._last = mark(timed=True)

    def receipt(self, fallback: list[str], patience: Patience) -> Receipt:
        """Waits for the end. A peer's death leaves the GPU waiting, until the source is aborted."""
        if not self._is_cuda:
            wire, load = self._received - self._start, time.perf_counter() - self._received
            return Receipt("", 0.0, wire, load, fallback)
        end = mark(timed=True)
        while not has_happened(end):
            patience.check()
            time.sleep(1e-4)
        wire = self._first.elapsed_time(self._last) / 1e3
        load = self._last.elapsed_time(end) / 1e3
        idle = self._first.elapsed_time(self._free) / 1e3
        return Receipt("", idle, wire, load, fallback)


def _find(name: str) -> tuple[dist.ProcessGroup, dist.Store]:
    """The group that SGLang joined under `name`, and its store."""
    group = next(group for group, known in _world.pg_names.items() if known == name)
    return group, _world.pg_map[group][1]


_receivers: dict[str, Receiver] = {}
"""Receivers by what orders name, of the one trainer there is: SGLang gives a loader no place."""
