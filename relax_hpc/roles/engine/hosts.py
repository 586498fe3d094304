"""The engines of one task, kept side by side."""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from relax_hpc import heartbeat
from relax_hpc.errors import RelaxError
from relax_hpc.roles.engine.host import EngineHost

BEAT_S = 1.0


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
    """Says that the event loop turns."""
    while True:
        heartbeat.beat()
        await asyncio.sleep(BEAT_S)


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
