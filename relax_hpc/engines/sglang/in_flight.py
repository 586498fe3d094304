"""Runs inside SGLang: its requests, looked at while they stand still.

SGLang 0.5.17 does not say which weights sampled a token. Later versions do, but where steps overlap
they count one token too many as new: the result of the step before a pause is booked after it.
SGLang has no call for any of this: its scheduler is found as the caller of this code.
"""

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch

log = logging.getLogger(__name__)

_TOP_K_ALL = 1 << 30
"""SGLang's `top_k` of a request that has none."""


def num_sampled() -> dict[str, int] | None:
    """Response tokens by request, of those that have any; to be called by a weight loader.

    Returns:
        None if it cannot be told: this SGLang keeps its requests in another way, or samples
        speculatively.
    """
    try:
        return _count(_scheduler())
    except (AttributeError, LookupError) as error:
        log.warning("how far requests are cannot be told: %r", error)
        return None


def renew_filters() -> None:
    """Asks again which filters the next steps need; to be called by a weight loader.

    SGLang (0.5.17, 0.5.23) sorts the vocabulary for the whole batch once a request with `top_k` or
    `top_p` has joined it, a greedy one too, and goes on with that when the request has long ended,
    until the batch is empty: which it never is while a trainer and its engines run side by side.
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
    """Orders what the current stream does next after the step that was begun, which still reads the
    weights; to be called by a weight loader. Where it is not known who runs it, waits for all."""
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
