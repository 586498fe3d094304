"""Processes that make media canonical, so that the loop that feeds the engines does not wait."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from relax_hpc.config.media import Store
from relax_hpc.errors import ConfigError
from relax_hpc.media.canonical import Measured, canonical
from relax_hpc.media.expand import Span
from relax_hpc.media.recipe import Recipe
from relax_hpc.media.spool import Spool, Spooled, View, opened_spool, write
from relax_hpc.media.stored import stored, stored_as_array
from relax_hpc.parentage import end_with
from relax_hpc.schema import Medium

MOST_WORKERS = 8
"""Processes of a task, if the job does not say how many."""
LONGEST_S = 1800.0
"""Time that a medium may take to be decoded: who has none, waits for ever."""
DEADLY = (
    f"ends the process that decodes it, or keeps it for more than {LONGEST_S:g} s; replace it, or "
    "remove the line"
)
"""Remark on a medium that does."""
_Task = asyncio.Task[tuple[Medium, Spooled]]


class Prepared(NamedTuple):
    """The media of a prompt, decoded."""

    media: tuple[Medium, ...]
    """Media as the bus stores them."""
    view: View
    """Media as engines are shown them."""


class MediaWorkers:
    """Decodes media, each once for all siblings. An asynchronous context manager.

    Processes are started when the first medium comes, and end with the block or with this process.
    """

    def __init__(
        self,
        recipe: Recipe,
        num_workers: int | None = None,
        parent: Path | None = None,
        store: Store = "source",
    ) -> None:
        """Starts nothing.

        Args:
            recipe: of the model.
            num_workers: processes; None is one for each core, eight at most.
            parent: folder of the spool; memory of this node if not given.
            store: form in which the bus gets media.
        """
        cores = len(os.sched_getaffinity(0))
        self._recipe, self._num_workers = recipe, num_workers or min(cores, MOST_WORKERS)
        self._parent, self._store, self._open = parent, store, ExitStack()
        self._spool: Spool | None = None
        # Who is decoded beside one that ends its process is decoded again, in a process of its own.
        self._room = asyncio.Semaphore(self._num_workers)
        self._pool: ProcessPoolExecutor | None = None
        self._tasks = set[_Task]()

    async def __aenter__(self) -> Self:
        self._spool = self._open.enter_context(opened_spool(self._parent))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._spool = None
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._open.close()

    @asynccontextmanager
    async def prepared(
        self, media: Sequence[Measured], spans: Sequence[Span]
    ) -> AsyncIterator[Prepared]:
        """Decodes the media of a prompt; their arrays lie in the spool for the block.

        Args:
            media: by their places.
            spans: tokens that stand for features of them.

        Raises:
            ConfigError: one cannot be decoded.
            RelaxError: there is no room for it.
        """
        assert self._spool is not None, "enter it first"
        # Not cancelled with the prompt: a worker that writes would leave its file behind.
        under_way = [asyncio.create_task(self._one(self._spool, each)) for each in media]
        self._tasks.update(under_way)
        try:
            await asyncio.shield(asyncio.gather(*under_way))
            made = [each.result() for each in under_way]
            view = View(tuple(spooled for _, spooled in made), tuple(spans))
            yield Prepared(tuple(medium for medium, _ in made), view)
        finally:
            for each in under_way:
                each.add_done_callback(self._forget)

    def _forget(self, done: "_Task") -> None:
        self._tasks.discard(done)
        if self._spool and not done.cancelled() and done.exception() is None:
            self._spool.release(done.result()[1].digest)

    async def _one(self, spool: Spool, medium: Measured) -> tuple[Medium, Spooled]:
        draft = spool.draft()
        async with self._room:
            pool = self._running()
            try:
                made, digest = await self._in(pool, medium, draft)
            except BrokenProcessPool:  # by this medium, or by another that was decoded beside it
                if self._pool is pool:
                    self._pool = None
                made, digest = await self._alone(medium, draft)
        return made, Spooled(medium.extent, digest, spool.keep(draft, digest))

    async def _alone(self, medium: Measured, draft: Path) -> tuple[Medium, bytes]:
        draft.unlink(missing_ok=True)
        pool = new_pool(1)
        try:
            return await self._in(pool, medium, draft)
        except BrokenProcessPool:
            raise medium.source.refused(DEADLY) from None
        finally:
            pool.shutdown(wait=False)

    async def _in(
        self, pool: ProcessPoolExecutor, medium: Measured, draft: Path
    ) -> tuple[Medium, bytes]:
        loop = asyncio.get_running_loop()
        given = medium, self._recipe, draft, self._store, LONGEST_S
        return await loop.run_in_executor(pool, _make, *given)

    def _running(self) -> ProcessPoolExecutor:
        assert self._spool is not None, "it has ended"
        if self._pool is None:
            self._pool = new_pool(self._num_workers)
        return self._pool


def new_pool(size: int) -> ProcessPoolExecutor:
    """Processes that decode, and end with this one."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(size, spawn, initializer=end_with, initargs=(os.getpid(),))


@contextmanager
def within(longest_s: float) -> Iterator[None]:
    """Ends this process where the block takes longer, also where a decoder lets nobody else run."""
    signal.setitimer(signal.ITIMER_REAL, longest_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _make(
    medium: Measured, recipe: Recipe, file: Path, store: Store, longest_s: float
) -> tuple[Medium, bytes]:
    """Decodes a medium into a file, in a process of the pool."""
    with within(longest_s):
        found = canonical(medium, recipe)
    digest = found.digest
    write(file, found.array)
    if store == "canonical":
        return stored_as_array(found, digest), digest
    try:
        return stored(medium, digest), digest
    except ConfigError:
        file.unlink()
        raise
