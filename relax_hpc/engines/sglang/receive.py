"""Runs inside SGLang: receives a version of the weights in one call.

SGLang calls `receive` as a `--custom-weight-loader`, in every rank of an engine, between two
steps. What is to be done stands in the name of the one "tensor" it is given; what is to be
received, the trainer has left in the store of the weight group, and there the answer goes, too. Two
buffers: while one is copied to its places, the next bucket arrives.

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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world

from relax_hpc.comm.broadcast import Transfer, start_broadcast
from relax_hpc.comm.bucket import BucketPlan, Spec, fingerprint
from relax_hpc.comm.orders import PLAN, Order, Receipt, abort_key, key_of
from relax_hpc.comm.streams import has_happened, mark, new_stream
from relax_hpc.engines.sglang.copies import (
    Copies,
    LoadWeights,
    NotPureError,
    load,
    record,
    uncovered,
)

log = logging.getLogger(__name__)

_BUFFERS = 2
_LOOK_S = 0.1
"""Between looks whether the trainer gave up."""


def receive(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """See the top of this file."""
    [(text, _)] = named_tensors
    order = Order(**json.loads(text))
    group, store = _find(order.group)
    try:
        receiver = _receivers.get(order.group)
        if order.task == "prepare" or receiver is None:
            _receivers.clear()  # there is one trainer
            receiver = _receivers[order.group] = Receiver(model, group, store, order.timeout_s)
        patience = _Patience(order, store)
        run = {"prepare": receiver.prepare, "receive": receiver.receive, "check": receiver.check}
        receipt = run[order.task](patience)
    except (RuntimeError, TimeoutError, ValueError, KeyError, AssertionError) as error:
        log.exception("weights of the trainer were not received")
        _receivers.pop(order.group, None)
        receipt = Receipt(error=f"{type(error).__name__}: {error}")
    try:
        store.set(key_of(order.serial, group.rank()), json.dumps(asdict(receipt)))
    except dist.DistError:
        log.exception("the trainer is gone; the weights are undefined")


class _Patience:
    """How long to wait for the trainer."""

    def __init__(self, order: Order, store: dist.Store) -> None:
        self.deadline = time.monotonic() + order.timeout_s
        self._key, self._store, self._next = abort_key(order.serial), store, 0.0

    def check(self) -> None:
        """Raises an error once there is nothing to wait for: it is late, or the trainer gave up."""
        now = time.monotonic()
        if now > self.deadline:
            raise TimeoutError("the trainer's broadcast did not end")
        if now > self._next:
            self._next = now + _LOOK_S
            if self._store.check([self._key]):  # an error, too, if the trainer is dead
                raise TimeoutError("the trainer gave this update up")


class Receiver:
    """A rank of an engine in one weight group."""

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, store: dist.Store, timeout_s: float
    ) -> None:
        store.wait([PLAN], timedelta(seconds=timeout_s))
        self._plan = BucketPlan.from_json(store.get(PLAN).decode())
        self._model, self._group = model, group
        self._load_weights: LoadWeights = getattr(model, "load_weights")  # noqa: B009
        device = next(model.parameters()).device
        self._is_cuda = device.type == "cuda"
        size = max(self._plan.sizes)
        self._flat = [
            torch.empty(size, dtype=torch.uint8, device=device)
            for _ in range(min(_BUFFERS, len(self._plan.buckets)))
        ]
        self._stream = new_stream(device)
        self._loads, self._fallback = self._recorded()
        self._places = self._addresses()

    def prepare(self, patience: _Patience) -> Receipt:
        """Uses the wire once, so that the first update is as fast as the others."""
        transfer = start_broadcast(self._group, self._bucket(0))
        self._wait(transfer, patience)
        return Receipt(fallback=self._fallback)

    def receive(self, patience: _Patience) -> Receipt:
        """Receives all buckets and puts their contents where they belong."""
        return self._run(patience, lambda index: self._loads[index]())

    def check(self, patience: _Patience) -> Receipt:
        """The same, and tells what came and whether it is where it belongs."""
        fingerprints, differing = list[int](), list[int]()

        def load(index: int) -> None:
            self._loads[index]()
            fingerprints.append(fingerprint(self._bucket(index)))
            copies = self._copies.get(index)
            differing.append(copies.differing() if copies else 0)

        receipt = self._run(patience, load)
        receipt.fingerprints, receipt.differing = fingerprints, sum(differing)
        return receipt

    def _run(self, patience: _Patience, load: Callable[[int], None]) -> Receipt:
        if self._places != self._addresses():  # parameters were made anew
            self._loads, self._fallback = self._recorded()
            self._places = self._addresses()
        clock = _Clock(self._is_cuda)
        loaded = list[torch.cuda.Event]()
        for index in range(len(self._plan.buckets)):
            if self._stream:
                if index >= len(self._flat):
                    self._stream.wait_event(loaded[index - len(self._flat)])
                with torch.cuda.stream(self._stream):
                    transfer = start_broadcast(self._group, self._bucket(index))
                    transfer.order_after()
                torch.cuda.current_stream().wait_stream(self._stream)
            else:
                transfer = start_broadcast(self._group, self._bucket(index))
                self._wait(transfer, patience)
            if index + 1 == len(self._plan.buckets):
                clock.received(self._stream)
            load(index)
            if self._stream:
                loaded.append(mark())
        return clock.receipt(self._fallback, self._group, patience)

    def _wait(self, transfer: Transfer, patience: _Patience) -> None:
        with _abort_on_error(self._group):
            transfer.wait(patience.deadline, patience.check)

    def _bucket(self, index: int) -> Tensor:
        return self._flat[index % len(self._flat)][: self._plan.sizes[index]]

    def _recorded(self) -> tuple[list[Callable[[], Any]], list[str]]:
        """For every bucket what loads it, and why some of them are loaded the slow way."""
        self._copies: dict[int, Copies] = {}
        reasons = []
        for index, bucket in enumerate(self._plan.buckets):
            try:
                flat = self._bucket(index)
                self._copies[index] = record(self._load_weights, flat, bucket)
            except NotPureError as error:
                reasons.append(f"{bucket[0].name} and on: {error}")
        if missing := uncovered(self._model, self._copies.values()) if not reasons else []:
            reasons.append(f"nothing is known to be copied to {', '.join(missing[:3])}")
            self._copies = {}
        loads: list[Callable[[], Any]] = [
            self._copies[index].make if index in self._copies else self._loader(index, bucket)
            for index, bucket in enumerate(self._plan.buckets)
        ]
        return loads, reasons

    def _loader(self, index: int, bucket: tuple[Spec, ...]) -> Callable[[], Any]:
        return lambda: load(self._load_weights, self._bucket(index), bucket)

    def _addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._model.parameters()]


class _Clock:
    """Times an update on the host or, where copies are asynchronous, on the GPU."""

    def __init__(self, is_cuda: bool) -> None:
        start = time.perf_counter()
        if is_cuda:
            torch.cuda.synchronize()  # a step that was begun still reads the weights
            self._first = self._last = mark(timed=True)
        self._is_cuda = is_cuda
        self._start, self._idle = time.perf_counter(), time.perf_counter() - start
        self._received = self._start

    def received(self, stream: torch.cuda.Stream | None) -> None:
        self._received = time.perf_counter()
        if stream:
            self._last = mark(stream, timed=True)

    def receipt(
        self, fallback: list[str], group: dist.ProcessGroup, patience: _Patience
    ) -> Receipt:
        """Waits for the end. A peer's death leaves the GPU waiting, until the group is aborted."""
        if not self._is_cuda:
            wire, load = self._received - self._start, time.perf_counter() - self._received
            return Receipt("", self._idle, wire, load, fallback)
        end = mark(timed=True)
        with _abort_on_error(group):
            while not has_happened(end):
                patience.check()
                time.sleep(1e-4)
        wire = self._first.elapsed_time(self._last) / 1e3
        load = self._last.elapsed_time(end) / 1e3
        return Receipt("", self._idle, wire, load, fallback)


@contextmanager
def _abort_on_error(group: dist.ProcessGroup) -> Iterator[None]:
    """Else a GPU that waits for bytes would never do anything again."""
    try:
        yield
    except (RuntimeError, TimeoutError):
        group.abort()
        raise


def _find(name: str) -> tuple[dist.ProcessGroup, dist.Store]:
    """The group that SGLang joined under `name`, and its store."""
    group = next(group for group, known in _world.pg_names.items() if known == name)
    return group, _world.pg_map[group][1]


_receivers: dict[str, Receiver] = {}
"""The group of the trainer, if there is one; SGLang gives a loader no place of its own."""
