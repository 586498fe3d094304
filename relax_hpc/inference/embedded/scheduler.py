"""Batches requests continuously: one thread owns the model, the cache and every running request.

A step decodes one token of each running request. Only between two steps do requests enter and
leave, pauses begin, and weights change, so a token belongs to exactly one policy.

The randomness of a request is a function of its seed and the position, without a shared generator.
So other requests in the batch, a pause, or a restart with the tokens so far as prompt cannot change
the tokens that a seed draws.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_hpc.errors import EngineError
from relax_hpc.inference.embedded.model import Decoder, KvCache
from relax_hpc.schema import FinishReason

_GARBAGE = 255
"""A byte that makes an element of every weight dtype NaN."""


class Released:
    """Weights whose memory was released; their views stay valid."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in weights}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._sizes:
            if storage.resizable():  # on a CPU not, once numpy has looked at it
                storage.resize_(0)

    def resume(self) -> None:
        """Allocates the memory again, filled with NaN."""
        for storage, size in self._sizes:
            if storage.nbytes() != size:
                storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(_GARBAGE)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Returns one number in [0, 1) per (seed, position). Both are [B].

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), once over the seed and once more
    over the resulting stream, so that neighbouring seeds do not share shifted streams.
    """
    with np.errstate(over="ignore"):
        stream = _mix(seeds.astype(np.uint64) + _GOLDEN)
        bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


class SamplingLimits(NamedTuple):
    """Per-row limits of sampling."""

    top_ps: Tensor
    """[B] float64; 1 means all."""
    top_ks: Tensor
    """[B] int64, above 0."""


def sample(
    logits: Tensor, temperatures: Tensor, draws: Tensor, limits: SamplingLimits | None = None
) -> tuple[Tensor, Tensor]:
    """Draws one token per row by inverting its cumulative distribution.

    Args:
        logits: [B, vocab].
        temperatures: [B] float32; 0 takes the most likely token.
        draws: [B] float64 in [0, 1).
        limits: top-p and top-k; None means all tokens.

    Returns:
        [B] tokens, and [B] float32 log-probabilities in nats of logits / temperature (of the
        logits if it is 0) over all tokens. As in SGLang, they ignore `limits`.
    """
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures)[:, None]
    logprobs = (logits.float() / scale).log_softmax(-1)
    # float64: a float32 sum over a large vocabulary would cut off the tail.
    probabilities = logprobs.exp()
    if limits is not None:
        probabilities = probabilities * mask_kept(logprobs, limits)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    below = torch.nextafter(total, torch.zeros_like(total))  # a product can be rounded up to it
    targets = torch.minimum(draws * total, below)[:, None]
    drawn = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    tokens = torch.where(greedy, logprobs.argmax(-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def mask_kept(logprobs: Tensor, limits: SamplingLimits) -> Tensor:
    """Returns [B, vocab], the tokens that both limits keep, as in SGLang.

    A token is in the top p if the likelier ones have less than p together, over all tokens rather
    than the top k. Among equally likely tokens lower ids come first.
    """
    ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.exp().double()
    likelier = probabilities.cumsum(-1) - probabilities
    ranks = torch.arange(logprobs.shape[-1], device=logprobs.device)
    top_ps = limits.top_ps[:, None]
    inside = (ranks < limits.top_ks[:, None]) & ((likelier < top_ps) | (top_ps == 1))
    return torch.zeros_like(inside).scatter(-1, ids, inside)


T = TypeVar("T")

MEMORY = ("kv_cache", "weights")
"""Tags of memory that can be released."""


class VersionSpan(NamedTuple):
    """Response tokens [start, end) sampled by one policy version."""

    version: str
    start: int
    end: int


class Completion(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish: FinishReason
    version: str


class Chunk(NamedTuple):
    """Tokens since the last chunk of a streamed request."""

    token_ids: list[int]
    logprobs: list[float]
    num_sampled: int
    """Response tokens so far."""
    version: str
    """Current version of the engine."""


@dataclass(slots=True)
class SequenceRequest:
    """One sequence to sample, and its tokens so far."""

    rid: str
    prompt: Sequence[int]
    seed: int
    temperature: float
    max_new_tokens: int
    stop_ids: frozenset[int]
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
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
        """Returns the tokens for the model to read: the prompt and, after a retraction, the
        response so far."""
        return (*self.prompt, *self.token_ids)

    def emit(self, version: str) -> None:
        """Streams the new tokens, if it is time."""
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
        """Marks the next tokens as sampled by `version`."""
        start = len(self.token_ids)
        if self.version_starts and self.version_starts[-1][1] == start:
            self.version_starts.pop()  # that version sampled nothing
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, start))

    def finish(self, reason: FinishReason, version: str) -> None:
        """Completes the future; a caller that left is no error."""
        ends = [*(start for _, start in self.version_starts), len(self.token_ids)][1:]
        spans = [  # none of a request that never ran
            VersionSpan(v, start, end)
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
        self._running: list[SequenceRequest] = []
        """Request i has cache slot i."""
        self._waiting: deque[SequenceRequest] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._released: dict[str, Released] = {}
        self._wake = threading.Condition()
        self._stopping = False

    # Called from any thread.

    def submit(self, requests: Iterable[SequenceRequest]) -> None:
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
        with self._wake:
            self._stopping = True
            self._wake.notify()

    @property
    def load(self) -> tuple[int, int]:
        """Returns recent numbers of (running, waiting) requests."""
        return len(self._running), len(self._waiting)

    # Called in the scheduler's thread, as commands.

    def set_paused(self, paused: bool) -> None:
        """Freezes or thaws all requests; their cache stays as it is."""
        self.paused = paused

    def retract(self) -> None:
        """Moves running requests back to waiting, without their cache, which is recomputed
        later."""
        with self._wake:
            self._waiting.extendleft(reversed(self._running))
        self._running = []

    def update(self, tensors: Iterable[tuple[str, Tensor]], version: str | None) -> None:
        """Loads weights; running requests keep their cache."""
        self.model.load(tensors)
        if version is not None:
            self.set_version(version)

    def set_version(self, version: str) -> None:
        """Names the policy that samples from now on."""
        self.version = version
        for request in self._running:
            request.mark(version)

    def abort(self, rid: str | None) -> int:
        """Ends request `rid`, or all. Returns their number."""
        with self._wake:
            waiting = [r for r in self._waiting if rid in (None, r.rid)]
            self._waiting = deque(r for r in self._waiting if rid not in (None, r.rid))
        slots = [slot for slot, r in enumerate(self._running) if rid in (None, r.rid)]
        for request in waiting:
            request.finish(FinishReason.ABORT, self.version)
        self._retire([(slot, FinishReason.ABORT) for slot in slots])
        return len(waiting) + len(slots)

    def release_memory(self, tags: Iterable[str]) -> None:
        """Releases memory; nothing is sampled until all of it is back.

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
        """Admits requests that fit, with one prefill per length; siblings share their prompt's."""
        batch: list[SequenceRequest] = []
        with self._wake:
            while self._waiting and len(self._running) + len(batch) < self._max_running:
                batch.append(self._waiting.popleft())
        by_length: dict[int, list[SequenceRequest]] = {}
        for request in batch:
            by_length.setdefault(len(request.tokens), []).append(request)
        for length, requests in by_length.items():
            self._prefill(length, requests)

    def _prefill(self, length: int, requests: list[SequenceRequest]) -> None:
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

    def _sample(self, logits: Tensor, requests: list[SequenceRequest], first: int) -> None:
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

    def _limits(self, requests: list[SequenceRequest], vocab_size: int) -> SamplingLimits | None:
        if all(r.top_p == 1 and r.top_k == 0 for r in requests):
            return None
        top_ps = torch.tensor([r.top_p for r in requests], dtype=torch.float64)
        top_ks = self._tensor([r.top_k or vocab_size for r in requests])
        return SamplingLimits(top_ps.to(self.model.device), top_ks)

    def _retire(self, finished: Sequence[tuple[int, FinishReason]]) -> None:
        """Completes requests and closes the holes they leave. Args are in ascending order of
        slots."""
        for slot, reason in reversed(finished):
            request, last = self._running[slot], self._running.pop()
            if last is not request:
                self._running[slot] = last
                self._cache.move(len(self._running), slot)
            request.finish(reason, self.version)

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)
