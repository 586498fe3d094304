"""Continuous batching: one thread owns the model, the cache and every running request.

A step decodes one token of each running request. Between two steps, and only there, requests enter
and leave, the pause takes hold, and weights change, so a token belongs to exactly one policy.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from relax_hpc.engines.embedded.memory import Released
from relax_hpc.engines.embedded.model import Decoder, KvCache
from relax_hpc.engines.embedded.sampling import Limits, sample, uniforms
from relax_hpc.errors import EngineError
from relax_hpc.schema import FinishReason

T = TypeVar("T")

MEMORY = ("kv_cache", "weights")
"""Tags of what can be released."""


class Span(NamedTuple):
    """Response tokens [start, end) that one policy version sampled."""

    version: str
    start: int
    end: int


class Completion(NamedTuple):
    """A request that has ended."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish: FinishReason
    version: str
    """Version the engine held when the request ended."""


class Chunk(NamedTuple):
    """Tokens that came since the last chunk of a streamed request."""

    token_ids: list[int]
    logprobs: list[float]
    num_sampled: int
    """Response tokens up to here."""
    version: str
    """Version the engine holds now."""


@dataclass(slots=True)
class Request:
    """One sequence to sample, and what there is of it."""

    rid: str
    prompt: Sequence[int]
    seed: int
    temperature: float
    max_new_tokens: int
    stop_ids: frozenset[int]
    top_p: float = 1.0
    top_k: int = 0
    """0 is all."""
    done: "Future[Completion]" = field(default_factory=Future)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_starts: list[tuple[str, int]] = field(default_factory=list)
    stream: Callable[[Chunk], None] | None = None
    """Called in the scheduler's thread after the first token, and then every `stream_interval`."""
    stream_interval: int = 1
    num_streamed: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens for the model to read: the prompt and, after a retraction, the response so far."""
        return (*self.prompt, *self.token_ids)

    def emit(self, version: str) -> None:
        """Streams what there is, if it is time."""
        sampled = len(self.token_ids)
        if self.stream and (sampled - 1) % self.stream_interval == 0:
            new = slice(self.num_streamed, sampled)
            self.stream(Chunk(self.token_ids[new], self.logprobs[new], sampled, version))
            self.num_streamed = sampled

    def take(self, token: int, logprob: float) -> bool:
        """Appends a token. Returns whether it was the last one."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        return token in self.stop_ids or len(self.token_ids) >= self.max_new_tokens

    def mark(self, version: str) -> None:
        """Tokens from here on are sampled by `version`."""
        start = len(self.token_ids)
        if self.version_starts and self.version_starts[-1][1] == start:
            self.version_starts.pop()  # that version sampled nothing
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, start))

    def finish(self, reason: FinishReason, version: str) -> None:
        """Completes the future; a caller who has gone away is no error."""
        ends = [*(start for _, start in self.version_starts), len(self.token_ids)][1:]
        spans = [  # none of a request that never ran
            Span(v, start, end)
            for (v, start), end in zip(self.version_starts, ends, strict=True)
            if end > start
        ]
        if self.done.set_running_or_notify_cancel():
            self.done.set_result(Completion(self.token_ids, self.logprobs, spans, reason, version))


class Scheduler:
    """Runs requests and, between steps, commands; `run` is the body of its thread."""

    def __init__(self, model: Decoder, *, max_running: int, version: str) -> None:
        self.model, self.version, self.paused = model, version, False
        self._cache = KvCache(model.shape, model.dtype, model.device)
        self._max_running = max_running
        self._running: list[Request] = []
        """Request i has cache slot i."""
        self._waiting: deque[Request] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._released: dict[str, Released] = {}
        self._wake = threading.Condition()
        self._stopping = False

    # Called from any thread.

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests; their `done` futures complete in the scheduler's thread."""
        with self._wake:
            self._waiting.extend(requests)
            self._wake.notify()

    def call(self, command: Callable[[], T]) -> "Future[T]":
        """Runs `command` in the scheduler's thread, between two steps, paused or not."""
        future: Future[T] = Future()
        with self._wake:
            self._commands.append((command, future))
            self._wake.notify()
        return future

    def stop(self) -> None:
        """Ends `run` after the current step."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    @property
    def load(self) -> tuple[int, int]:
        """(running, waiting) requests, at some moment just now."""
        return len(self._running), len(self._waiting)

    # Called in the scheduler's thread, as commands.

    def set_paused(self, paused: bool) -> None:
        """Freezes or thaws all requests; their cache stays as it is."""
        self.paused = paused

    def retract(self) -> None:
        """Lets running requests wait, without their cache: it is computed again when they run."""
        with self._wake:
            self._waiting.extendleft(reversed(self._running))
        self._running = []

    def update(self, tensors: Iterable[tuple[str, Tensor]], version: str | None) -> None:
        """Loads weights; running requests go on with the cache they have."""
        self.model.load(tensors)
        if version is not None:
            self.set_version(version)

    def set_version(self, version: str) -> None:
        """Names the policy that samples from here on."""
        self.version = version
        for request in self._running:
            request.mark(version)

    def abort(self, rid: str | None) -> int:
        """Ends request `rid`, or all of them. Returns how many."""
        with self._wake:
            waiting = [r for r in self._waiting if rid in (None, r.rid)]
            self._waiting = deque(r for r in self._waiting if rid not in (None, r.rid))
        slots = [slot for slot, r in enumerate(self._running) if rid in (None, r.rid)]
        for request in waiting:
            request.finish(FinishReason.ABORT, self.version)
        self._retire([(slot, FinishReason.ABORT) for slot in slots])
        return len(waiting) + len(slots)

    def release_memory(self, tags: Iterable[str]) -> None:
        """Gives memory back; nothing is sampled until all of it is there again.

        Raises:
            EngineError: requests are running or waiting.
        """
        if self._running or self._waiting:
            raise EngineError(
                f"{len(self._running)} requests are running and {len(self._waiting)} waiting; only "
                "an idle engine releases memory"
            )
        if "kv_cache" in tags:
            self._cache = KvCache(self.model.shape, self.model.dtype, self.model.device)
        for tag in set(tags) - self._released.keys():
            weights = self.model.weights.values() if tag == "weights" else ()
            self._released[tag] = Released(weights)

    def resume_memory(self, tags: Iterable[str]) -> None:
        """Takes memory again; weights are garbage until they are loaded.

        Raises:
            EngineError: it was not released.
        """
        if missing := set(tags) - self._released.keys():
            raise EngineError(f"memory of {', '.join(sorted(missing))} was not released")
        for tag in set(tags):
            self._released.pop(tag).resume()

    # The thread.

    @torch.inference_mode()
    def run(self) -> None:
        """Steps until `stop`; sleeps while there is nothing to do."""
        while not self._stopping:
            self._run_commands()
            if self._stands or not (self._running or self._waiting):
                with self._wake:
                    self._wake.wait_for(self._has_news, timeout=1.0)
                continue
            self._admit()
            if self._running:
                self._decode()

    def _has_news(self) -> bool:
        return bool(self._stopping or self._commands or (self._waiting and not self._stands))

    @property
    def _stands(self) -> bool:
        return self.paused or bool(self._released)

    def _run_commands(self) -> None:
        while self._commands:
            command, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command())
            except (EngineError, RuntimeError, ValueError, OSError) as error:
                future.set_exception(error)  # the caller answers; the running requests go on

    def _admit(self) -> None:
        """Takes in what fits, one prefill per length, siblings sharing their prompt's."""
        batch: list[Request] = []
        with self._wake:
            while self._waiting and len(self._running) + len(batch) < self._max_running:
                batch.append(self._waiting.popleft())
        by_length: dict[int, list[Request]] = {}
        for request in batch:
            by_length.setdefault(len(request.tokens), []).append(request)
        for length, requests in by_length.items():
            self._prefill(length, requests)

    def _prefill(self, length: int, requests: list[Request]) -> None:
        first = len(self._running)
        self._running += requests
        for request in requests:
            request.mark(self.version)
        given = [r.tokens for r in requests]
        index = {tokens: i for i, tokens in enumerate(dict.fromkeys(given))}
        source = self._tensor([index[tokens] for tokens in given])
        slots = torch.arange(first, len(self._running), device=self.model.device)
        # Room for some decoding, so that growing is rare.
        self._cache.reserve(len(self._running), length + 64)
        logits = self.model.prefill(self._tensor(list(index)), self._cache, slots, source)
        self._sample(logits[source], requests, first)

    def _decode(self) -> None:
        requests = self._running
        tokens = self._tensor([r.token_ids[-1] for r in requests])
        positions = [len(r.prompt) + len(r.token_ids) - 1 for r in requests]
        length = max(positions) + 1
        self._cache.reserve(len(requests), length)
        logits = self.model.decode(tokens, self._tensor(positions), self._cache, length)
        self._sample(logits, requests, 0)

    def _sample(self, logits: Tensor, requests: list[Request], first: int) -> None:
        """Draws the next token of `requests`, which hold the slots from `first` on."""
        positions = np.array([len(r.prompt) + len(r.token_ids) for r in requests])
        draws = torch.from_numpy(uniforms(np.array([r.seed for r in requests]), positions))
        temperatures = torch.tensor([r.temperature for r in requests], dtype=torch.float32)
        device = self.model.device
        limits = self._limits(requests, logits.shape[-1])
        tokens, logprobs = sample(logits, temperatures.to(device), draws.to(device), limits)
        finished = []
        rows = zip(requests, tokens.tolist(), logprobs.tolist(), strict=True)
        for slot, (request, token, logprob) in enumerate(rows, first):
            if request.take(token, logprob):
                stopped = token in request.stop_ids
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                finished.append((slot, reason))
            else:
                request.emit(self.version)
        self._retire(finished)

    def _limits(self, requests: list[Request], vocab_size: int) -> Limits | None:
        if all(r.top_p == 1 and r.top_k == 0 for r in requests):
            return None
        top_ps = torch.tensor([r.top_p for r in requests], dtype=torch.float64)
        top_ks = self._tensor([r.top_k or vocab_size for r in requests])
        return Limits(top_ps.to(self.model.device), top_ks)

    def _retire(self, finished: Sequence[tuple[int, FinishReason]]) -> None:
        """Completes requests and closes the holes they leave; slots in ascending order."""
        for slot, reason in reversed(finished):
            request, last = self._running[slot], self._running.pop()
            if last is not request:
                self._running[slot] = last
                self._cache.move(len(self._running), slot)
            request.finish(reason, self.version)

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)
