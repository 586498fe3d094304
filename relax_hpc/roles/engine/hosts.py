"""The engines of one task, kept side by side."""

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from relax_hpc import heartbeat
from relax_hpc.errors import RelaxError
from relax_hpc.roles.engine.host import EngineHost

log = logging.getLogger(__name__)

BEAT_S = 1.0
_STILL_S = 1.5
"""Standing still of the event loop for longer than this is told of."""
_SAID_S = 60.0
"""Seconds between two warnings of that."""


@contextmanager
def kept(made: Iterable[EngineHost]) -> Iterator[list[EngineHost]]:
    """Starts them all at once, and stops them so."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(host) for host in made]
        try:
            yield hosts
        finally:
            for host in hosts:
                host.ask_to_stop()


async def _beat() -> None:
    """Says that the event loop turns, and when it does not for a while."""
    said = -math.inf
    while True:
        heartbeat.beat()
        begin = time.monotonic()
        await asyncio.sleep(BEAT_S)
        late = time.monotonic() - begin - BEAT_S
        if late > _STILL_S and begin > said + _SAID_S:
            said = begin
            log.warning(
                "the event loop of this task stood still for %.1f s, and all of its episodes: "
                "an environment, or what else is called in it, waits without `await`; use "
                "asyncio.sleep, an asynchronous client or asyncio.to_thread",
                late,
            )


async def while_kept(hosts: Sequence[EngineHost], loop: Coroutine[Any, Any, None]) -> None:
    """Runs the loop to its end; ends it if one of its engines does not come back.

    Raises:
        RelaxError: the loop was cancelled by something within it.
    """
    running = asyncio.ensure_future(loop)
    failures = [asyncio.ensure_future(host.failure()) for host in hosts]
    beating = asyncio.ensure_future(_beat())
    with heartbeat.phase("loop"):
        await asyncio.wait({running, *failures}, return_when=asyncio.FIRST_COMPLETED)
    beating.cancel()
    cancelled_itself = running.done() and running.cancelled()
    for task in (running, *failures):
        if not task.done():
            task.cancel()
    # The loop may have failed because an engine did, so what its host says comes first.
    for outcome in await asyncio.gather(*failures, running, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
    if cancelled_itself:  # its work is not done
        raise RelaxError("the loop of the task was cancelled by something that it had called")
