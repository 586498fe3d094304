"""Runs inside SGLang: receives a version of the weights in one call.

SGLang calls `receive` as a `--custom-weight-loader`, in every rank of an engine, between two steps.
The name of the one "tensor" it passes is the order. The buckets come from a `BucketSource`, by
broadcast or through shared GPU memory, and the receipt goes to the store of that source. There are
two buffers: while one is copied into place, the next bucket arrives. No exception escapes, since it
would end the engine: the trainer gets the failure, and fences the engine.

An update also drops cached features of media, and counts the tokens of running requests. SGLang
0.5.17 does not report which weights sampled a token. Later versions do, but with overlapped steps
they count one token too many as new: the result of the step before a pause is booked after it.
SGLang has no API for any of this, so we find its scheduler as a caller of this code.
"""

import inspect
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world

from relax_hpc.inference.sglang.copies import (
    Copies,
    LoadWeights,
    MisfitError,
    NotPureError,
    find_left_over,
    find_uncovered,
    load,
    record,
    scales_are_converted,
)
from relax_hpc.runtime.comm.bucket import BucketPlan, Spec, fingerprint
from relax_hpc.runtime.comm.lanes import Taker
from relax_hpc.runtime.comm.orders import (
    GIVEN_UP,
    PLAN,
    Order,
    Patience,
    Receipt,
    abort_key,
    key_of,
    receipt_file,
)
from relax_hpc.runtime.comm.torch_group import Transfer, start_broadcast
from relax_hpc.runtime.devices import mark, new_stream, wait_for
from relax_hpc.runtime.files.records import write_json
from relax_hpc.trainer.models.weight_files import FileReader, Manifest

_BUFFERS = 2


class BucketSource:
    store: dist.Store
    """Store for messages besides the buckets."""
    rank: int
    """Number under which this rank leaves receipts."""
    plan: BucketPlan

    def bucket(self, index: int) -> Tensor:
        raise NotImplementedError

    def take_over(self, other: "BucketSource") -> bool:
        """Takes over another source's buffers, if the same buckets arrive in them; returns
        whether."""
        return False

    def warm_up(self, patience: Patience) -> None:
        """Does slow first-time work."""

    def fetch(self, index: int, order: Order, patience: Patience) -> None:
        """Orders the current stream after the arrival of bucket `index`."""
        raise NotImplementedError

    def free(self, index: int, order: Order) -> None:
        """Frees bucket `index` once the work already on the current stream is done."""
        raise NotImplementedError

    def abort(self) -> None:
        """Ends the GPU's waits."""


class BroadcastSource(BucketSource):
    """A weight group that SGLang has joined."""

    def __init__(self, order: Order, device: torch.device) -> None:
        self._group, self.store = _find(order.group)
        self.rank = self._group.rank()
        self.store.wait([PLAN], timedelta(seconds=order.timeout_s))
        self.plan = BucketPlan.from_json(self.store.get(PLAN).decode())
        self._device, self._stream = device, new_stream(device)
        self._free = dict[int, torch.cuda.Event]()
        """Buffer -> event after its last use."""

    def bucket(self, index: int) -> Tensor:
        return self._flat[index % len(self._flat)][: self.plan.sizes[index]]

    def take_over(self, other: BucketSource) -> bool:
        if not isinstance(other, BroadcastSource) or other.plan != self.plan:
            return False
        self._flat = other._flat
        return True

    def warm_up(self, patience: Patience) -> None:
        """Makes a first use of the wire, so that the first update is as fast as the others."""
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


class LaneSource(BucketSource):
    """Memory shared with the trainer's rank on this GPU; it is mapped already, and no GPU waits."""

    def __init__(self, order: Order, device: torch.device) -> None:
        self._taker = Taker(order, device)
        self.store, self.rank = self._taker.store.raw, order.lane
        self.plan = self._taker.plan

    def bucket(self, index: int) -> Tensor:
        return self._taker.bucket(index)

    def fetch(self, index: int, order: Order, patience: Patience) -> None:
        self._taker.wait_for(index, order, patience)

    def free(self, index: int, order: Order) -> None:
        self._taker.give_back(index, order)


def source_of(order: Order, model: nn.Module) -> BucketSource:
    """Returns the source that an order names.

    Raises:
        RuntimeError: its trainer is gone.
        StopIteration: the engine has not joined the group.
    """
    device = next(model.parameters()).device
    return BroadcastSource(order, device) if order.group else LaneSource(order, device)


def _find(name: str) -> tuple[dist.ProcessGroup, dist.Store]:
    """Returns the group that SGLang joined under `name`, and its store."""
    group = next(group for group, known in _world.pg_names.items() if known == name)
    return group, _world.pg_map[group][1]


log = logging.getLogger(__name__)

_MODULES = ("sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils")
"""Modules with the cache: since 0.5.23, and in 0.5.17."""


def forget() -> None:
    """Drops the features that an encoder computed before its weights changed.

    Their keys contain a policy version, so only requests sent before an update and started after it
    could use them.
    """
    for name in _MODULES:
        cache = getattr(sys.modules.get(name), "embedding_cache", None)
        if cache is not None:
            cache.clear()


_BUCKET_BYTES = 1 << 28


def compare(model: nn.Module, folder: Path) -> Receipt:
    """Reads all files, and compares them with the parameters where the model's loader would put
    them.

    Returns:
        Checksums of the files as read; the number of parameter slices that differ; as `fallback`,
        the tensors that could not be compared.

    Raises:
        ValueError: the folder has no manifest.
    """
    manifest = Manifest.read(folder)
    if manifest is None:
        raise ValueError(f"{folder} is not complete")
    load_weights: LoadWeights = getattr(model, "load_weights")  # noqa: B009
    device = next(model.parameters()).device
    receipt, targets = Receipt(), list[Tensor]()
    for name in sorted(manifest.files):
        file = FileReader(folder / name)
        for bucket, content in file.buckets(_BUCKET_BYTES):
            flat = torch.from_numpy(content).to(device)
            try:
                copies = record(load_weights, flat, bucket)
            except NotPureError as error:
                receipt.fallback.append(f"{bucket[0].name} and on: {error}")
                continue
            receipt.differing += copies.differing()
            targets += copies.targets
        receipt.fingerprints.append(file.checksum)
    if missing := find_uncovered(model, targets) if not receipt.fallback else []:
        receipt.fallback.append(f"nothing is known to be copied to {', '.join(missing[:3])}")
    return receipt


_TOP_K_ALL = 1 << 30
"""SGLang's `top_k` of a request without one."""


def num_sampled() -> dict[str, int] | None:
    """Returns response tokens by request, without empty ones; for use in a weight loader.

    Returns:
        None if unknown: this SGLang keeps its requests in another way, or samples speculatively.
    """
    try:
        return _count(_scheduler())
    except (AttributeError, LookupError) as error:
        log.warning("how far requests are cannot be told: %r", error)
        return None


def renew_filters() -> None:
    """Recomputes which filters the next steps need; for use in a weight loader.

    SGLang (0.5.17, 0.5.23) sorts the vocabulary for the whole batch once a request with `top_k` or
    `top_p` has joined it, even a greedy one, and continues until the batch is empty. Beside a
    trainer, an engine's batch never is.
    """
    try:
        batch = _scheduler().running_batch
        wanted = [req.sampling_params for req in batch.reqs if not req.finished()]
        if not wanted:
            return
        batch.sampling_info.need_top_k_sampling &= any(each.top_k != _TOP_K_ALL for each in wanted)
        batch.sampling_info.need_top_p_sampling &= any(each.top_p != 1.0 for each in wanted)
        batch.sampling_info.need_min_p_sampling &= any(each.min_p > 0 for each in wanted)
    except (AttributeError, LookupError) as error:
        log.warning("what requests sample with cannot be told: %r", error)


def let_step_end() -> None:
    """Orders the current stream after the running step, which still reads the weights; for use in a
    weight loader. If the step's stream is unknown, waits for all."""
    try:
        running = _scheduler().forward_stream
    except (AttributeError, LookupError):
        running = None
    if isinstance(running, torch.cuda.Stream):
        torch.cuda.current_stream().wait_stream(running)
    else:
        torch.cuda.synchronize()


def _scheduler() -> Any:  # noqa: ANN401
    frame = inspect.currentframe()
    while frame := frame and frame.f_back:
        owner = frame.f_locals.get("self")
        if hasattr(owner, "running_batch") and hasattr(owner, "waiting_queue"):
            return owner
    raise LookupError("no scheduler among the callers")


def _count(scheduler: Any) -> dict[str, int] | None:  # noqa: ANN401
    found = {req.rid: len(req.output_ids) for req in _live(scheduler) if not req.finished()}
    for batch, _ in scheduler.result_queue if scheduler.enable_overlap else ():
        if not batch.spec_algorithm.is_none():
            return None
        for req in batch.reqs:  # of a step that has run, and whose result was not looked at yet
            samples = batch.forward_mode.is_decode() or req.inflight_middle_chunks <= 0
            if samples and not req.is_retracted and not req.finished():
                found[req.rid] = len(req.output_ids) + 1
    return {rid: count for rid, count in found.items() if count}


def _live(scheduler: Any) -> Iterator[Any]:  # noqa: ANN401
    for batch in (scheduler.running_batch, scheduler.last_batch):
        yield from batch.reqs if batch else ()
    yield from scheduler.waiting_queue  # among them those whose cache was thrown away
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req


def receive(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Receives weights; see the module."""
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
            forget()
            renew_filters()
    except (RuntimeError, OSError, ValueError, KeyError, AssertionError) as error:
        log.exception("weights of the trainer were not received")
        _receivers.pop(key, None)
        _fail(source, order, error)
    else:
        _tell(source, order, receipt)


def _fail(source: BucketSource, order: Order, error: Exception) -> None:
    """Ends an order for all ranks, and reports the reason to the trainer.

    If another rank has already aborted the transfer, reports that rank's reason instead.
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


def _tell(source: BucketSource, order: Order, receipt: Receipt) -> None:
    try:
        source.store.set(key_of(order.serial, source.rank), json.dumps(asdict(receipt)))
    except dist.DistError:
        log.exception("the trainer is gone; the weights are undefined")


def _report(model: nn.Module, order: Order) -> None:
    """Answers an order to report weights that were loaded from files."""
    forget()
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
    """A rank of an engine with its source of weights."""

    def __init__(self, model: nn.Module, source: BucketSource) -> None:
        self.source = source
        self._model = model
        self._load_weights: LoadWeights = getattr(model, "load_weights")  # noqa: B009
        self._beside = new_stream(next(model.parameters()).device)
        if scales_are_converted(model):
            raise ValueError(
                "SGLang keeps scales of FP8 as powers of two for DeepGEMM; "
                "start it with engines.rollout.args.fp8_gemm_backend = 'triton'"
            )
        self._loads, self._fallback = self._record()
        self._places = self._addresses()

    def follow(self, source: BucketSource) -> bool:
        """Continues with another source, if the recorded copies still hold; returns whether.

        Recording takes seconds for thousands of experts, while all engines are paused. A restarted
        trainer, or a new group, sends the same buckets.
        """
        if not source.take_over(self.source):
            return False
        self.source = source
        return True

    def do(self, order: Order, patience: Patience) -> Receipt:
        """Carries out an order.

        Raises:
            KeyError: not an order for a receiver.
        """
        tasks = {
            "learn": self.learn,
            "prepare": self.prepare,
            "receive": self.receive,
            "check": self.check,
        }
        return tasks[order.task](order, patience)

    def learn(self, order: Order, patience: Patience) -> Receipt:
        """Reports how it will load; the constructor has found the places."""
        return Receipt(fallback=self._fallback)

    def prepare(self, order: Order, patience: Patience) -> Receipt:
        """Warms up."""
        self.source.warm_up(patience)
        return self.learn(order, patience)

    def receive(self, order: Order, patience: Patience) -> Receipt:
        return self._run(order, patience, lambda index: self._loads[index]())

    def check(self, order: Order, patience: Patience) -> Receipt:
        """Does as `receive`, and reports digests and whether the weights are in place."""
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
            self._loads, self._fallback = self._record()
            self._places = self._addresses()
        clock, skipped = _Clock(self._beside), set(order.skipped)
        coming = [n for n in range(len(self.source.plan.buckets)) if n not in skipped]
        for index in coming:
            self.source.fetch(index, order, patience)
            if index == coming[-1]:
                clock.note_received()
            load(index)
            self.source.free(index, order)
        return clock.receipt(self._fallback, patience)

    def _record(self) -> tuple[list[Callable[[], Any]], list[str]]:
        """Returns a loader for every bucket, and why some load slowly."""
        self._copies: dict[int, Copies] = {}
        reasons = []
        for index, bucket in enumerate(self.source.plan.buckets):
            try:
                flat = self.source.bucket(index)
                self._copies[index] = record(self._load_weights, flat, bucket)
            except NotPureError as error:
                reasons.append(f"{bucket[0].name} and on: {error}")
        targets = (target for copies in self._copies.values() for target in copies.targets)
        if missing := find_uncovered(self._model, targets) if not reasons else []:
            self._check_names(missing)
            reasons.append(f"nothing is known to be copied to {', '.join(missing[:3])}")
            self._copies = {}
        loads: list[Callable[[], Any]] = [
            self._copies[index].make if index in self._copies else self._loader(index, bucket)
            for index, bucket in enumerate(self.source.plan.buckets)
        ]
        return loads, reasons

    def _check_names(self, missing: list[str]) -> None:
        """Raises for names that SGLang's loader ignored: it skips unknown names silently.

        A rank has no place for other ranks' experts, so their tensors may be left over.
        """
        unknown = [
            name
            for index, bucket in enumerate(self.source.plan.buckets)
            for name in find_left_over(self._copies[index], self.source.bucket(index), bucket)
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
    """Times an update on the host or, with asynchronous copies, on the GPU.

    Making it orders the current stream after the engine's running step; the first buckets arrive
    meanwhile.
    """

    def __init__(self, beside: torch.cuda.Stream | None) -> None:
        """`beside`: an idle stream of the GPU, if there is a GPU."""
        self._start = self._received = time.perf_counter()
        self._is_cuda = beside is not None
        if beside is not None:
            self._first = mark(beside, timed=True)
            let_step_end()
            self._free = self._last = mark(timed=True)

    def note_received(self) -> None:
        """Marks that the current stream has the last bucket."""
        self._received = time.perf_counter()
        if self._is_cuda:
            self._last = mark(timed=True)

    def receipt(self, fallback: list[str], patience: Patience) -> Receipt:
        """Waits for the end. If a peer dies, the GPU waits until the source is aborted."""
        if not self._is_cuda:
            wire, load = self._received - self._start, time.perf_counter() - self._received
            return Receipt("", 0.0, wire, load, fallback)
        end = mark(timed=True)
        wait_for(end, patience.check)
        wire = self._first.elapsed_time(self._last) / 1e3
        load = self._last.elapsed_time(end) / 1e3
        idle = self._first.elapsed_time(self._free) / 1e3
        return Receipt("", idle, wire, load, fallback)


def _receiver_of(source: BucketSource, model: nn.Module) -> Receiver:
    """Returns the existing receiver, if it can continue, or a new one: there is one trainer."""
    if _receivers:
        _, before = _receivers.popitem()
        if before.follow(source):
            return before
        del before  # with its buffers, before there are others
    return Receiver(model, source)


_receivers: dict[str, Receiver] = {}
"""Receivers by name in orders, of the one trainer: SGLang has no place for a loader's state."""
