"""Decodes media in worker processes, so that a slow or crashing decoder cannot stall sampling."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from relax_hpc.config.prompts import Store
from relax_hpc.data.media.canonical import Measured, canonical, measure_media
from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.recipe import Recipe
from relax_hpc.data.media.source import MediaSource
from relax_hpc.data.media.spool import MediaView, Spool, Spooled, open_spool, write
from relax_hpc.data.media.stored import make_stored_array, read_stored
from relax_hpc.errors import ConfigError
from relax_hpc.runtime.process import end_with
from relax_hpc.schema import Medium

MOST_WORKERS = 8
"""Default upper limit of worker processes per task."""
LONGEST_S = 1800.0
"""Time limit to read or decode a medium; without one, a task could wait for ever."""
DEADLY = (
    f"ends the process that decodes it, or keeps it for more than {LONGEST_S:g} s; replace it, or "
    "remove the line"
)
"""Error text for such a medium."""
_TRIES = 2
"""A worker may also have been killed for another reason, e.g. lack of memory."""
_Task = asyncio.Task[tuple[Medium, Spooled]]
T = TypeVar("T")


class Decoders:
    """Worker processes for foreign decoders. A medium that kills its process, or takes too long, is
    refused by name, and no other with it.

    Each thread has its own process, so the guilty medium is certain. They start with the first
    media, and end with the block or with this process.
    """

    def __init__(self, size: int | None = None) -> None:
        """Starts nothing.

        Args:
            size: processes; None is one per core, eight at most.
        """
        size = size or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        self._threads, self._own = ThreadPoolExecutor(size, "decoder"), threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def submit(self, source: MediaSource, act: Callable[..., T], *given: object) -> Future[T]:
        """Calls `act(*given)` in a process, once one is free.

        Args:
            source: the medium to refuse if the process dies.
            act: a module-level function.
        """
        return self._threads.submit(self._call, source, act, given)

    def headers(self, sources: Sequence[MediaSource], recipe: Recipe) -> "Headers":
        return Headers([self.submit(each, measure_media, [each], recipe) for each in sources])

    def _call(self, source: MediaSource, act: Callable[..., T], given: Sequence[object]) -> T:
        for _ in range(_TRIES):
            if (pool := getattr(self._own, "pool", None)) is None:
                pool = self._own.pool = _process()
            try:
                return pool.submit(_call_bounded, LONGEST_S, act, given).result()
            except BrokenProcessPool:
                pool.shutdown(wait=False)
                self._own.pool = None
        raise source.make_error(DEADLY)


class Headers:
    """Headers of media that are being read. `result` blocks for them; `await` does not block the
    loop."""

    def __init__(self, jobs: Sequence[Future[tuple[Measured, ...]]] = ()) -> None:
        self._jobs = jobs

    def result(self) -> tuple[Measured, ...]:
        """Returns the media, in order.

        Raises:
            ConfigError: for the first unusable one.
        """
        try:
            return tuple(medium for job in self._jobs for medium in job.result())
        finally:
            self.cancel()

    def __await__(self) -> Generator[Any, None, tuple[Measured, ...]]:
        return self._await_all().__await__()

    async def _await_all(self) -> tuple[Measured, ...]:
        found = list[Measured]()
        try:
            for job in self._jobs:
                media = await asyncio.wrap_future(job)
                found += media
        finally:
            self.cancel()
        return tuple(found)

    def cancel(self) -> None:
        """Cancels headers not yet being read."""
        for job in self._jobs:
            job.cancel()


class Prepared(NamedTuple):
    media: tuple[Medium, ...]
    """As the bus stores them."""
    view: MediaView
    """As engines are shown them."""


class MediaWorkers:
    """Decodes each medium once for all siblings. An asynchronous context manager."""

    def __init__(
        self,
        recipe: Recipe,
        decoders: Decoders,
        parent: Path | None = None,
        store: Store = "source",
    ) -> None:
        """Starts nothing.

        Args:
            parent: folder of the spool; default is this node's memory.
            store: form in which the bus gets media.
        """
        self._recipe, self._decoders = recipe, decoders
        self._parent, self._store, self._open = parent, store, ExitStack()
        self._spool: Spool | None = None
        self._jobs, self._tasks = set[Future[tuple[Medium, bytes]]](), set[_Task]()

    async def __aenter__(self) -> Self:
        self._spool = self._open.enter_context(open_spool(self._parent))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._spool = None
        for job in tuple(self._jobs):
            job.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._open.close()

    @asynccontextmanager
    async def prepare(
        self, media: Sequence[Measured], spans: Sequence[MediaSpan]
    ) -> AsyncIterator[Prepared]:
        """Decodes the media of a prompt; their arrays lie in the spool for the block.

        Args:
            media: by their places.
            spans: tokens that stand for their features.

        Raises:
            ConfigError: one cannot be decoded.
            RelaxError: there is no space for it.
        """
        assert self._spool is not None, "enter it first"
        # Not cancelled with the prompt: a worker that writes would leave its file behind.
        under_way = [asyncio.create_task(self._one(self._spool, each)) for each in media]
        self._tasks.update(under_way)
        try:
            await asyncio.shield(asyncio.gather(*under_way))
            made = [each.result() for each in under_way]
            view = MediaView(tuple(spooled for _, spooled in made), tuple(spans))
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
        given = medium, self._recipe, draft, self._store
        job = self._decoders.submit(medium.source, _make, *given)
        self._jobs.add(job)
        try:
            made, digest = await asyncio.wrap_future(job)
        finally:
            self._jobs.discard(job)
        return made, Spooled(medium.extent, digest, spool.keep(draft, digest))


def _process() -> ProcessPoolExecutor:
    """A process that decodes, and ends with the thread that started it."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawn, initializer=_begin, initargs=(os.getpid(),))


def _begin(owner: int) -> None:
    end_with(owner)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it is for who started it


def _call_bounded(longest_s: float, act: Callable[..., T], given: Sequence[object]) -> T:
    """Calls a function; ends this process after the limit, even if a decoder holds the
    interpreter's lock."""
    signal.setitimer(signal.ITIMER_REAL, longest_s)
    try:
        return act(*given)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _make(medium: Measured, recipe: Recipe, file: Path, store: Store) -> tuple[Medium, bytes]:
    file.unlink(missing_ok=True)  # of a process that ended
    found = canonical(medium, recipe)
    digest = found.digest
    write(file, found.array)
    if store == "canonical":
        return make_stored_array(found, digest), digest
    try:
        made = read_stored(medium, digest)
    except ConfigError:
        file.unlink()
        raise
    if store == "smaller" and found.array.nbytes < len(made.data):
        made = make_stored_array(found, digest)
    return made, digest
