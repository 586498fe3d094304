"""Runs inside SGLang: receives a version of the weights in one call.

SGLang calls `receive` as a `--custom-weight-loader`, in every rank of an engine, between two
steps. What is to be done stands in the name of the one "tensor" it is given; what is to be
received, the trainer has left in a store, and there the answer goes, too. Where buckets come from
is in `sources`.

No exception leaves it, for that would end the engine: a failure is told to the trainer, which then
fences the engine.
"""

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from relax_hpc.comm.bucket import Spec, fingerprint
from relax_hpc.comm.orders import Order, Receipt, abort_key, key_of, receipt_file
from relax_hpc.comm.patience import GIVEN_UP, Patience
from relax_hpc.comm.streams import mark, new_stream, wait_for
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
from relax_hpc.engines.sglang.sources import Source, source_of
from relax_hpc.records import write_json

log = logging.getLogger(__name__)


def receive(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """See the top of this file."""
    [(text, _)] = named_tensors
    order = Order(**json.loads(text))
    if order.task in ("compare", "count"):
        _report(model, order)
        return
    key = order.group or order.store
    receiver = None if order.begins else _receivers.get(key)
    try:
        source = receiver.source if receiver else source_of(order, model)
    except (RuntimeError, StopIteration):  # nobody to tell; the trainer misses the receipt
        log.exception("the trainer that gives orders is not to be found")
        return
    try:
        if receiver is None:
            receiver = _receivers[key] = _receiver_of(source, model)
        receipt = receiver.do(order, Patience(order, source.store))
        if not order.begins:
            receipt.num_sampled = num_sampled()
            features.forget()
            renew_filters()
    except (RuntimeError, OSError, ValueError, KeyError, AssertionError) as error:
        log.exception("weights of the trainer were not received")
        _receivers.pop(key, None)
        _fail(source, order, error)
    else:
        _tell(source, order, receipt)


def _fail(source: Source, order: Order, error: Exception) -> None:
    """Ends an order for everybody, and tells the trainer why.

    A wire that breaks when others have ended it breaks for their sake.
    """
    why, end = f"{type(error).__name__}: {error}", abort_key(order.serial)
    with suppress(dist.DistError):  # the trainer is gone
        if isinstance(error, RuntimeError) and source.store.check([end]):
            why += f"; {GIVEN_UP}"
        source.store.set(end, "")
    _tell(source, order, Receipt(error=why))
    try:
        source.abort()
    except RuntimeError:
        log.exception("what the GPU waits for could not be ended")


def _tell(source: Source, order: Order, receipt: Receipt) -> None:
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
        """Carries an order out.

        Raises:
            KeyError: it is none for a receiver.
        """
        tasks = {
            "learn": self.learn,
            "prepare": self.prepare,
            "receive": self.receive,
            "check": self.check,
        }
        return tasks[order.task](order, patience)

    def learn(self, order: Order, patience: Patience) -> Receipt:
        """Says how it will load: the places were found when this was made."""
        return Receipt(fallback=self._fallback)

    def prepare(self, order: Order, patience: Patience) -> Receipt:
        """Does once what takes longer the first time."""
        self.source.warm_up(patience)
        return self.learn(order, patience)

    def receive(self, order: Order, patience: Patience) -> Receipt:
        """Receives all buckets and puts their contents where they belong."""
        return self._run(order, patience, lambda index: self._loads[index]())

    def check(self, order: Order, patience: Patience) -> Receipt:
        """The same, and tells what came and whether it is where it belongs."""
        fingerprints, differing = list[int](), list[int]()

        def load(index: int) -> None:
            if self._beside:  # what is read back blocks the host, where nobody looks at limits
                wait_for(mark(), patience.check)
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
        for index in coming:
            self.source.fetch(index, order, patience)
            if index == coming[-1]:
                clock.received()
            load(index)
            self.source.free(index, order)
        return clock.receipt(self._fallback, patience)

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
        wait_for(end, patience.check)
        wire = self._first.elapsed_time(self._last) / 1e3
        load = self._last.elapsed_time(end) / 1e3
        idle = self._first.elapsed_time(self._free) / 1e3
        return Receipt("", idle, wire, load, fallback)


def _receiver_of(source: Source, model: nn.Module) -> Receiver:
    """Returns that of the trainer before, if it can go on, or makes one: there is one trainer."""
    if _receivers:
        _, before = _receivers.popitem()
        if before.follow(source):
            return before
        del before  # with its buffers, before there are others
    return Receiver(model, source)


_receivers: dict[str, Receiver] = {}
"""Receivers by what orders name, of the one trainer there is: SGLang gives a loader no place."""
