"""Routes requests to several engines, and moves them when an engine goes away.

* A sample comes from exactly one reply: its draft moves from engine to engine, and only the one
  coroutine that owns it ever returns it. So a sample exists once, however often it is retried.
* Deadly requests: work of a crashed engine moves elsewhere, so a request that crashes engines
  crashes one after the other. Its neighbours in the batch look as guilty. So requests whose engines
  crashed twice before a token came are sent one at a time.
* Prefixes: siblings wait until the first of them has computed a long shared prefix. Requests that
  reach an engine together would each compute it, since it looks into its cache when it starts a
  request. With images that is most of the work of a prompt group.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from relax_hpc.errors import DeadlyRequestError, EngineError, EngineFaultError, EngineLostError
from relax_hpc.inference.generation import (
    Counts,
    Draft,
    Generation,
    GenerationClient,
    Load,
    Sampling,
)
from relax_hpc.schema import FinishReason

Computed = Callable[[], None]
"""Reports that an engine has computed the prefix; may be called repeatedly."""


class Leads:
    """Prefixes that one request is computing first."""

    def __init__(self, is_known: Callable[[Hashable], bool]) -> None:
        """`is_known`: whether an engine has had a prefix before."""
        self._is_known = is_known
        self._led: dict[Hashable, asyncio.Event] = {}

    @asynccontextmanager
    async def turn(self, prefix: Hashable | None) -> AsyncIterator[Computed]:
        """Waits while another request computes the prefix. The first one releases the others with
        the yielded call, at the latest at the end of the block. None is a prefix nobody shares."""
        while (led := self._led.get(prefix)) is not None:
            await led.wait()
        if prefix is None or self._is_known(prefix):
            yield lambda: None
            return
        mine = self._led[prefix] = asyncio.Event()

        def hand_on() -> None:
            if not mine.is_set():
                del self._led[prefix]
                mine.set()

        try:
            yield hand_on
        finally:
            hand_on()


_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_VERSION_AGE_S = 0.05
"""Age up to which a known version of an engine counts."""


class Endpoint(NamedTuple):
    """One start of one engine."""

    id: str
    start: str
    url: str
    token: str


EngineState = Literal["serving", "held", "lost"]
"""States of an engine for this pool. serving: gets requests. held: finishes its requests. lost: its
requests move elsewhere at once."""


class EngineLoad(NamedTuple):
    id: str
    counts: Counts
    """Tokens and media requested and returned, since it was enlisted."""
    in_flight: int
    version: int
    """Policy version when last seen; -1 if never seen."""
    kv_used: float | None
    """Fraction of the key-value cache in use, by all clients; None if not reported."""


@dataclass(eq=False, slots=True)
class PoolEngine:
    """One start of an engine, as a pool knows it."""

    endpoint: Endpoint
    client: GenerationClient
    limit: int
    """Most requests in flight."""
    state: EngineState = "held"
    version: int = -1
    """-1 means unknown."""
    asked_at: float = 0.0
    serves_since: float = 0.0
    """`time.monotonic` from which answers count: the policy may have changed before."""
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    failures: int = 0
    not_before: float = 0.0
    in_flight: set[str] = field(default_factory=set)
    kv_used: float | None = None
    rests: bool = False

    @property
    def usable(self) -> bool:
        return self.state == "serving" and time.monotonic() >= self.not_before

    def is_known(self) -> bool:
        """Whether its version is known, from a recent request or from its replies."""
        client = self.client
        if client.heard_at > self.asked_at:
            self.version, self.asked_at = client.heard_version, client.heard_at
        return self.asked_at > max(self.serves_since, time.monotonic() - _VERSION_AGE_S)

    def takes(self, min_version: int) -> bool:
        has_room = not self.rests and len(self.in_flight) < self.limit
        return self.usable and has_room and self.version >= max(min_version, 0)


def pause_s(failures: int) -> float:
    return min(_PAUSE_S * 2.0 ** min(failures, 32), _LONGEST_PAUSE_S)


def next_limit(limit: int, load: Load, in_flight: int, most: int) -> int:
    """Returns how many requests may be in flight at an engine.

    An engine with a full cache evicts requests and computes them again. So the limit falls by a
    tenth while the cache is nearly full, and grows by an eighth while there is space and no queue.
    """
    if load.kv_used > 0.95:
        return max(1, min(limit, in_flight) * 9 // 10)
    if load.kv_used < 0.85 and load.waiting == 0:
        return min(most, limit + max(1, limit // 8))
    return min(limit, most)


MOST_FAULTS = 16
"""Answers in a row without a token that a sample may get; takes about a minute."""
SUSPECT, DEADLY = 2, 3
"""Engines in a row that lost a request before a token came, after which it is sent alone; and that
crashed with it, the last one while it was alone, after which it is given up."""
_KNOWN_S, _LOOK_S = 15.0, 0.05
"""Time limit to find out whether an engine has ended, and interval of checks."""
_LONG = 1024
"""Tokens of a prompt from which siblings wait; with media, all do."""


class Request(NamedTuple):
    """A response to sample, by any engine."""

    asked: tuple[Sequence[int], int, Sampling]
    min_version: int
    homes: Sequence[Hashable]
    """Keys of its prefixes: requests with a common key have a common prefix."""

    @property
    def prefix(self) -> Hashable | None:
        """Returns the key of the prefix that siblings wait for, if it is expensive."""
        prompt, _, how = self.asked
        is_long = how.view is not None or len(prompt) >= _LONG
        return self.group if is_long else None

    @property
    def group(self) -> Hashable:
        """Returns the key of requests with the same beginning; None if there are none."""
        return self.homes[-1] if self.homes else None


class Attempts:
    """Attempts in a row to continue a sample that brought no token."""

    def __init__(self) -> None:
        self._number, self._faults, self._why = 0, 0, ""
        self.by = set[PoolEngine]()
        """Engines that failed; they are used again if no other has room."""
        self.lost, self.lost_alone = set[PoolEngine](), set[PoolEngine]()
        """Engines that lost it; those that did while it was `alone`."""
        self.alone = False
        """Whether it was sent alone among suspects; see `Suspects`."""

    def note_fault(self, engine: PoolEngine, why: str) -> None:
        """Counts an attempt that the engine answered with an error or aborted."""
        self._number, self._faults, self._why = self._number + 1, self._faults + 1, why
        self.by.add(engine)

    def note_loss(self, engine: PoolEngine, *, was_there: bool) -> None:
        """Counts an attempt that got no answer. If the engine `was_there` just before, it may have
        crashed with the request."""
        self._number += 1
        if was_there:
            self.lost.add(engine)
            if self.alone:
                self.lost_alone.add(engine)

    @property
    def ended(self) -> list[PoolEngine]:
        """Returns lost engines that are gone by now, by ids and starts."""
        return sorted((e for e in self.lost if e.state == "lost"), key=lambda e: e.endpoint)

    @property
    def pause_s(self) -> float:
        return pause_s(self._number - 1)

    def are_enough(self, serving: Collection[PoolEngine]) -> bool:
        """Whether to stop trying: several engines have failed, or all there are."""
        several = len(self.by) > 1 or (bool(serving) and self.by.issuperset(serving))
        return several and self._faults >= MOST_FAULTS

    def __str__(self) -> str:
        engines = sorted({engine.endpoint.id for engine in self.by})
        return f"{self._why}; no token in {self._faults} answers of {', '.join(engines)}"


class Suspects:
    """The requests of a pool that were lost more than once before a token came."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._deadly = dict[Hashable, str]()
        """Verdicts on requests by name, so that siblings need not crash further engines."""

    @asynccontextmanager
    async def turn(
        self, request: Request, draft: Draft, attempts: Attempts
    ) -> AsyncIterator[Computed]:
        """Waits while another suspect is in flight, if this request is one. Yields a call that lets
        the next one go, for use once a token has come; the end of the block calls it, too.
        """
        if len(attempts.lost) < SUSPECT:
            yield lambda: None
            return
        await self._one.acquire()
        attempts.alone = True

        def clear() -> None:
            if attempts.alone:
                attempts.alone = False
                self._one.release()

        try:
            yield clear
            if attempts.alone and attempts.lost_alone:
                await self._judge(request, draft, attempts)
        finally:
            clear()

    async def _judge(self, request: Request, draft: Draft, attempts: Attempts) -> None:
        """Records whether engines crashed with a request, once that is known of those it had
        alone."""
        deadline = time.monotonic() + _KNOWN_S
        while any(each.state != "lost" for each in attempts.lost_alone):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_LOOK_S)
        ended = attempts.ended
        if len(ended) >= DEADLY and not attempts.lost_alone.isdisjoint(ended):
            names = ", ".join(f"{each.endpoint.id} ({each.endpoint.start})" for each in ended)
            said = f"{len(ended)} engines ended when they were asked for it: {names}"
            self._deadly[_name_request(request, draft)] = said

    def refuse(self, request: Request, draft: Draft) -> None:
        """Gives up a request that crashes engines.

        Raises:
            DeadlyRequestError: they crashed with this one, or with a sibling that was as far.
        """
        if self._deadly and (found := self._deadly.get(_name_request(request, draft))) is not None:
            raise DeadlyRequestError(found)


def _name_request(request: Request, draft: Draft) -> Hashable:
    """Returns a key of the engine's input: siblings with the same tokens have the same key."""
    return request.group, (*request.asked[0], *draft.token_ids)


log = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Time for an engine to report its version or load."""
_HOMES = 1 << 16
"""Number of episodes and prompts whose engine is remembered."""


class _Waiting(NamedTuple):
    rid: str
    request: Request
    attempts: Attempts
    granted: "asyncio.Future[PoolEngine]"


class Pool:
    """Routes each sample to the engine that has its prefix, else to the least loaded one."""

    def __init__(
        self,
        connect: Callable[[Endpoint], GenerationClient],
        *,
        max_in_flight: int,
        patience_s: float,
    ) -> None:
        """Starts without engines, see `enlist`. Use it within one event loop.

        Args:
            max_in_flight: most samples per engine; fewer while its cache is full.
            patience_s: how long a sample may make no progress before that is an error.
        """
        self._connect, self._most, self._patience_s = connect, max_in_flight, patience_s
        self._engines: dict[tuple[str, str], PoolEngine] = {}
        self._homes: OrderedDict[Hashable, PoolEngine] = OrderedDict()
        self._queue: deque[_Waiting] = deque()
        self._leads, self._suspects = Leads(self._homes.__contains__), Suspects()
        self._name, self._numbers = uuid.uuid4().hex, itertools.count()
        """Rids, unique among the pools of an engine."""
        self._chores = set[asyncio.Task[None]]()
        self._excused_at = 0.0
        """Time up to which lack of progress is excused."""

    # Engines.

    def enlist(self, states: dict[Endpoint, EngineState]) -> None:
        """Takes the state of every engine; one that is left out is lost."""
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
        """Restarts patience: engines cannot serve for now, and will come back."""
        self._excused_at = time.monotonic()

    def rest(self, ids: Collection[str]) -> None:
        """Gives these engines no new requests, as long as there are others: they may be held for an
        update."""
        others = any(each.endpoint.id not in ids for each in self._engines.values())
        for engine in self._engines.values():
            engine.rests = others and engine.endpoint.id in ids
        self._grant()

    @property
    def in_flight(self) -> dict[str, int]:
        return {engine.endpoint.id: len(engine.in_flight) for engine in self._engines.values()}

    @property
    def loads(self) -> list[EngineLoad]:
        return [
            EngineLoad(e.endpoint.id, e.client.counts, len(e.in_flight), e.version, e.kv_used)
            for e in self._engines.values()
        ]

    async def version(self) -> int | None:
        """Returns the oldest policy version among serving engines; None if none serves."""
        if unknown := [engine for engine in self._usable() if not engine.is_known()]:
            await asyncio.gather(*(self._look(engine) for engine in unknown))
        return min((e.version for e in self._usable() if e.version >= 0), default=None)

    async def adapt(self) -> None:
        """Adapts the samples in flight to the engines' caches; call it about once a second.

        Engines that do not report their cache get `max_in_flight`.
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
        homes: Sequence[Hashable] = (),
        draft: Draft | None = None,
    ) -> Generation:
        """Samples one response, on as many engines in turn as it takes.

        Args:
            prompt: token ids.
            seed: >= 0.
            homes: keys of shared prefixes, of an episode or a prompt, the longest first. The sample
                goes to the engine that served one of them, while that has room. If the last prefix
                is long, or has media, it waits until one request has computed it.
            draft: the tokens so far; it grows while the response arrives.

        Raises:
            DeadlyRequestError: engines crash with it.
            EngineError: refused, or no progress for `patience_s` or `MOST_FAULTS` times in a row.
        """
        draft, since = Draft() if draft is None else draft, time.monotonic()
        attempts = Attempts()
        request = Request((prompt, seed, sampling), sampling.min_version, homes)
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
                return draft.finish(FinishReason.LENGTH)
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
        """Samples on one engine. Returns None, and notes why, if the response is incomplete."""
        rid = f"{self._name}-{next(self._numbers)}"
        # Where nobody waits, nobody is passed over.
        engine = None if self._queue else self._choose(rid, request, attempts)
        if engine is None:
            waiting = self._line_up(rid, request, attempts, first=bool(draft.token_ids))
            engine = await self._wait(waiting, since)

        def tell_all() -> None:
            for tell in begun:
                tell()

        was_there = False
        try:
            self._suspects.refuse(request, draft)
            if not engine.is_known():
                await self._look(engine)
            was_there = engine.usable
            done = await engine.client.sample(
                *request.asked, version=engine.version, draft=draft, rid=rid, computed=tell_all
            )
        except EngineLostError as error:
            self._note_failure(engine, error)
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
        """Queues; requests with tokens to lose go first."""
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
        """Keeps an engine as the home of prefixes while it is usable; others only help out.

        A request with a home by a shorter prefix needs no entry for the longer one.
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
        """Offers engines that serve now, or again, to requests that wait for their version.

        All at once: the first with a known version would otherwise get all requests.
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
        self._chores.discard(chore)
        if chore.cancelled() or (error := chore.exception()) is None:
            return
        for waiting in self._queue:
            if not waiting.granted.done():
                waiting.granted.set_exception(error)

    async def _look(self, engine: PoolEngine) -> None:
        async with engine.asking:
            if engine.is_known():
                return
            try:
                async with asyncio.timeout(_ANSWER_S):
                    engine.version = await engine.client.version()
            except TimeoutError:
                at = engine.endpoint.url
                late = EngineLostError(f"{at}: does not say its version within {_ANSWER_S:g} s")
                self._note_failure(engine, late)
            except EngineError as error:
                self._note_failure(engine, error)
            engine.asked_at = time.monotonic()

    def _note_failure(self, engine: PoolEngine, error: EngineError) -> None:
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
