"""Several engines as one: who gets which request, and what becomes of it if that engine goes.

A sample is taken from exactly one reply: its draft moves from engine to engine, and only the one
coroutine that owns it ever returns it. So however often it is tried, it is there once.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Coroutine, Hashable, Sequence
from typing import Any, NamedTuple

from relax_hpc.engines.generation import GenerationClient
from relax_hpc.engines.leads import Computed, Leads
from relax_hpc.engines.pool_engine import (
    Endpoint,
    EngineLoad,
    EngineState,
    PoolEngine,
    next_limit,
    pause_s,
)
from relax_hpc.engines.requests import Attempts, Request, Suspects
from relax_hpc.engines.response import Draft, Generation, Sampling
from relax_hpc.errors import EngineError, EngineFaultError, EngineLostError
from relax_hpc.schema import FinishReason

log = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Time for an engine to say its version, or how busy it is: nobody else waits longer for that."""
_HOMES = 1 << 16
"""Episodes and prompts whose engine is remembered."""


class _Waiting(NamedTuple):
    """A place in the queue for room."""

    rid: str
    request: Request
    attempts: Attempts
    granted: "asyncio.Future[PoolEngine]"


class Pool:
    """Routes samples: to the engine that has their prefix, else to the least loaded."""

    def __init__(
        self,
        connect: Callable[[Endpoint], GenerationClient],
        *,
        max_in_flight: int,
        patience_s: float,
    ) -> None:
        """Starts without engines, see `enlist`. Use it within one event loop.

        Args:
            connect: makes the client of an engine.
            max_in_flight: samples per engine at most; fewer while its cache is full.
            patience_s: how long a sample may get nowhere before that is an error.
        """
        self._connect, self._most, self._patience_s = connect, max_in_flight, patience_s
        self._engines: dict[tuple[str, str], PoolEngine] = {}
        self._homes: OrderedDict[Hashable, PoolEngine] = OrderedDict()
        self._queue: deque[_Waiting] = deque()
        self._leads, self._suspects = Leads(self._homes.__contains__), Suspects()
        self._name, self._numbers = uuid.uuid4().hex, itertools.count()
        """Make the rids, which no other pool of an engine has."""
        self._chores = set[asyncio.Task[None]]()
        self._excused_at = 0.0
        """Time up to which it was nobody's fault that a sample got nowhere."""

    # Engines.

    def enlist(self, states: dict[Endpoint, EngineState]) -> None:
        """Takes the state of every engine there is; one that is left out is lost."""
        known = {(at.id, at.start): (at, state) for at, state in states.items()}
        for key, (endpoint, state) in known.items():
            if key not in self._engines and state != "lost":
                self._engines[key] = PoolEngine(endpoint, self._connect(endpoint), self._most)
        ready = list[PoolEngine]()
        for key, engine in list(self._engines.items()):
            before, engine.state = engine.state, known[key][1] if key in known else "lost"
            if engine.state == "lost":
                self._forget(engine)
            elif engine.state == "serving" != before:
                engine.serves_since = time.monotonic()
                ready.append(engine)
        self._consider(*ready)
        self._grant()

    def excuse(self) -> None:
        """Patience with engines begins anew: for now they cannot serve, and come back."""
        self._excused_at = time.monotonic()

    def rest(self, ids: Collection[str]) -> None:
        """Gives these engines nothing new from now on, as long as there are others: those may be
        held for an update."""
        others = any(each.endpoint.id not in ids for each in self._engines.values())
        for engine in self._engines.values():
            engine.rests = others and engine.endpoint.id in ids
        self._grant()

    @property
    def in_flight(self) -> dict[str, int]:
        """Samples under way, by engine id."""
        return {engine.endpoint.id: len(engine.in_flight) for engine in self._engines.values()}

    @property
    def loads(self) -> list[EngineLoad]:
        """The work of every engine for this pool."""
        return [
            EngineLoad(e.endpoint.id, e.client.counts, len(e.in_flight), e.version, e.kv_used)
            for e in self._engines.values()
        ]

    async def version(self) -> int | None:
        """The oldest policy version among engines that serve; None if none does."""
        if unknown := [engine for engine in self._usable() if not engine.is_known()]:
            await asyncio.gather(*(self._look(engine) for engine in unknown))
        return min((e.version for e in self._usable() if e.version >= 0), default=None)

    async def adapt(self) -> None:
        """Fits the samples in flight to what the engines' caches hold; call it every second or so.

        Not every engine says how full it is; those get `max_in_flight`.
        """

        async def fit(engine: PoolEngine) -> None:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    load = await engine.client.load()
            except (EngineError, TimeoutError) as error:
                log.debug("%s: %r", engine.endpoint.id, error)
            else:
                in_flight, engine.kv_used = len(engine.in_flight), load.kv_used
                engine.limit = next_limit(engine.limit, load, in_flight, self._most)

        await asyncio.gather(*(fit(engine) for engine in self._usable()))
        self._grant()

    async def aclose(self) -> None:
        """Cuts all connections."""
        for engine in list(self._engines.values()):
            self._forget(engine)
        await asyncio.gather(*self._chores, return_exceptions=True)

    # Samples.

    async def sample(
        self,
        prompt: Sequence[int],
        seed: int,
        sampling: Sampling,
        *,
        min_version: int = 0,
        homes: Sequence[Hashable] = (),
        draft: Draft | None = None,
    ) -> Generation:
        """Samples one response, on as many engines one after the other as it takes.

        Args:
            prompt: token ids.
            seed: >= 0.
            sampling: how.
            min_version: oldest policy that may sample a token of it.
            homes: whose prefixes it shares, an episode's or a prompt's, the longest first; while
                it has room it goes to the engine that has served one of them. If the last one is
                long, or has media, it waits until that has been computed for one request.
            draft: what there is already; it grows while the response arrives.

        Raises:
            DeadlyRequestError: engines end with it.
            EngineError: refused, or got nowhere for `patience_s` or `MOST_FAULTS` times in a row.
        """
        draft, since = Draft() if draft is None else draft, time.monotonic()
        attempts = Attempts()
        request = Request((prompt, seed, sampling), min_version, homes)
        while True:
            held = len(draft.token_ids)
            async with (
                self._suspects.turn(request, draft, attempts) as cleared,
                self._leads.turn(request.prefix) as computed,
            ):
                since = time.monotonic() if attempts.alone else since  # it may have waited long
                done = await self._try(request, draft, since, (cleared, computed), attempts)
            if done is not None:
                return done
            if len(draft.token_ids) >= sampling.max_new_tokens:
                return draft.finished(FinishReason.LENGTH)
            if len(draft.token_ids) > held:
                since, attempts = time.monotonic(), Attempts()
                continue
            if attempts.are_enough([e for e in self._engines.values() if e.state == "serving"]):
                raise EngineError(str(attempts))
            await asyncio.sleep(attempts.pause_s)

    async def _try(
        self,
        request: Request,
        draft: Draft,
        since: float,
        begun: Sequence[Computed],
        attempts: Attempts,
    ) -> Generation | None:
        """Samples what one engine gives. Returns None, and notes why, if that is not all of it."""
        rid = f"{self._name}-{next(self._numbers)}"
        # Where nobody waits, nobody is passed over.
        engine = None if self._queue else self._choose(rid, request, attempts)
        if engine is None:
            waiting = self._line_up(rid, request, attempts, first=bool(draft.token_ids))
            engine = await self._wait(waiting, since)

        def computed() -> None:
            for tell in begun:
                tell()

        was_there = False
        try:
            self._suspects.refuse(request, draft)
            if not engine.is_known():
                await self._look(engine)
            was_there = engine.usable
            done = await engine.client.sample(
                *request.asked, version=engine.version, draft=draft, rid=rid, computed=computed
            )
        except EngineLostError as error:
            self._failed(engine, error)
            if isinstance(error, EngineFaultError):
                attempts.note_fault(engine, str(error))
            else:
                attempts.note_loss(engine, was_there=was_there)
            return None
        finally:
            engine.in_flight.discard(rid)
            self._grant()
        engine.failures = 0
        if done.finish is not FinishReason.ABORT:
            return done
        attempts.note_fault(engine, f"{engine.endpoint.url}: aborted")
        return None

    def _line_up(self, rid: str, request: Request, attempts: Attempts, *, first: bool) -> _Waiting:
        """Takes a place in the queue; who has something to lose goes first."""
        granted: asyncio.Future[PoolEngine] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(rid, request, attempts, granted)
        (self._queue.appendleft if first else self._queue.append)(waiting)
        return waiting

    async def _wait(self, waiting: _Waiting, since: float) -> PoolEngine:
        try:
            self._grant()
            while not waiting.granted.done():
                if any(engine.in_flight for engine in self._engines.values()):
                    since = time.monotonic()  # they get on, or break off after a silence
                left = max(since, self._excused_at) + self._patience_s - time.monotonic()
                if left <= 0:
                    raise EngineError(self._explain(waiting.request.min_version))
                await asyncio.wait({waiting.granted}, timeout=left)
        except BaseException:
            waiting.granted.cancel()
            if waiting.granted.done() and not waiting.granted.cancelled():
                waiting.granted.result().in_flight.discard(waiting.rid)
            raise
        return waiting.granted.result()

    def _grant(self) -> None:
        """Gives room to those who wait for it, in their order."""
        if not self._queue:
            return
        kept = deque[_Waiting]()
        try:
            while self._queue and any(engine.takes(0) for engine in self._usable()):
                waiting = self._queue[0]
                if not waiting.granted.done():  # nor withdrawn
                    if engine := self._choose(waiting.rid, waiting.request, waiting.attempts):
                        waiting.granted.set_result(engine)
                    else:
                        kept.append(waiting)
                self._queue.popleft()
        finally:
            self._queue.extendleft(reversed(kept))

    def _choose(self, rid: str, request: Request, attempts: Attempts) -> PoolEngine | None:
        """Gives a place in an engine to a request, if there is one."""
        homes, failed = request.homes, attempts.by | attempts.lost
        for home in homes:
            best = self._homes.get(home)
            if best is not None and best not in failed and best.takes(request.min_version):
                break
        else:
            able = [engine for engine in self._usable() if engine.takes(request.min_version)]
            if not able:
                return None
            able = [engine for engine in able if engine not in failed] or able
            best = min(able, key=lambda e: (len(e.in_flight) / e.limit, len(e.in_flight)))
        self._settle(homes, best)
        best.in_flight.add(rid)
        return best

    def _settle(self, homes: Sequence[Hashable], engine: PoolEngine) -> None:
        """A home is an engine as long as that can be used: others only help out.

        Who is at home with a shorter prefix needs no entry for the longer one.
        """
        at = None
        for home in reversed(homes):
            settled = self._homes.get(home)
            if settled is not None:
                if settled is not engine and not settled.usable:
                    self._homes[home] = settled = engine
                self._homes.move_to_end(home)
            elif at is not engine:
                self._homes[home] = settled = engine
                if len(self._homes) > _HOMES:
                    self._homes.popitem(last=False)
            at = settled or at

    def _consider(self, *engines: PoolEngine) -> None:
        """Gives engines that serve now, or again, to those who wait for one of their version.

        Together, for the first one whose version is known would get all of them.
        """
        usable = [engine for engine in engines if engine.usable]

        async def consider() -> None:
            await asyncio.gather(*(self._look(engine) for engine in usable))
            self._grant()

        if usable:
            self._begin(consider())

    def _begin(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._end)

    def _end(self, chore: asyncio.Task[None]) -> None:
        """Who waits for room is told what kept it from being given."""
        self._chores.discard(chore)
        if chore.cancelled() or (error := chore.exception()) is None:
            return
        for waiting in self._queue:
            if not waiting.granted.done():
                waiting.granted.set_exception(error)

    async def _look(self, engine: PoolEngine) -> None:
        """Brings what is known of an engine's version up to date."""
        async with engine.asking:
            if engine.is_known():
                return
            try:
                async with asyncio.timeout(_ANSWER_S):
                    engine.version = await engine.client.version()
            except TimeoutError:
                at = engine.endpoint.url
                late = EngineLostError(f"{at}: does not say its version within {_ANSWER_S:g} s")
                self._failed(engine, late)
            except EngineError as error:
                self._failed(engine, error)
            engine.asked_at = time.monotonic()

    def _failed(self, engine: PoolEngine, error: EngineError) -> None:
        if engine.state == "lost" or time.monotonic() < engine.not_before:
            return  # what ended with it is no further failure
        pause = pause_s(engine.failures)
        engine.failures += 1
        engine.not_before = time.monotonic() + pause
        log.warning("engine %s: %s; leaving it alone for %g s", engine.endpoint.id, error, pause)
        asyncio.get_running_loop().call_later(pause, self._consider, engine)

    def _forget(self, engine: PoolEngine) -> None:
        engine.state = "lost"
        self._begin(engine.client.aclose())
        del self._engines[engine.endpoint.id, engine.endpoint.start]
        for home in [home for home, at in self._homes.items() if at is engine]:
            del self._homes[home]

    def _usable(self) -> list[PoolEngine]:
        return [engine for engine in self._engines.values() if engine.usable]

    def _explain(self, min_version: int) -> str:
        states = ", ".join(
            f"{e.endpoint.id} ({e.endpoint.url}) {e.state}, version {e.version}"
            for e in self._engines.values()
        )
        return (
            f"no engine took a request for {self._patience_s:g} s that wants policy version "
            f"{min_version} or newer: {states or 'there is none'}"
        )
