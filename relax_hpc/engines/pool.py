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
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from relax_hpc.engines.generation import Draft, Generation, GenerationClient, Load, Sampling
from relax_hpc.errors import EngineError, EngineLostError
from relax_hpc.schema import FinishReason

log = logging.getLogger(__name__)

_VERSION_AGE_S = 0.05
"""Age up to which what is known of an engine's version is believed."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
"""An engine that failed is left alone, each time twice as long."""
_HOMES = 1 << 16
"""Episodes and prompts whose engine is remembered."""


class Endpoint(NamedTuple):
    """One start of one engine."""

    id: str
    start: str
    url: str
    token: str


EngineState = Literal["serving", "held", "lost"]
"""States of an engine for this pool. serving: gets requests. held: finishes those it has. lost: its
requests go on elsewhere at once."""


class EngineLoad(NamedTuple):
    """The work of an engine for this pool."""

    id: str
    num_tokens: int
    """Tokens sampled since it was enlisted."""
    in_flight: int
    version: int
    """Policy version when last seen; -1 if it never said."""
    kv_used: float | None
    """Fraction of the key-value cache in use, by whomever; None if it does not say."""


@dataclass(eq=False, slots=True)
class _Engine:
    endpoint: Endpoint
    client: GenerationClient
    limit: int
    """Requests that may be in flight."""
    state: EngineState = "held"
    version: int = -1
    """-1: not known yet."""
    asked_at: float = 0.0
    serves_since: float = 0.0
    """Time from which answers count, by `time.monotonic`: the policy may have changed before."""
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    failures: int = 0
    not_before: float = 0.0
    in_flight: set[str] = field(default_factory=set)
    """Rids of the requests under way."""
    kv_used: float | None = None

    @property
    def usable(self) -> bool:
        return self.state == "serving" and time.monotonic() >= self.not_before

    def is_known(self) -> bool:
        """Whether its version is: asked for lately, or said by its replies."""
        client = self.client
        if client.heard_at > self.asked_at:
            self.version, self.asked_at = client.heard_version, client.heard_at
        return self.asked_at > max(self.serves_since, time.monotonic() - _VERSION_AGE_S)

    def takes(self, min_version: int) -> bool:
        return (
            self.usable and len(self.in_flight) < self.limit and self.version >= max(min_version, 0)
        )


class _Waiting(NamedTuple):
    """A place in the queue for room."""

    rid: str
    homes: Sequence[Hashable]
    """Keys of its prefixes: requests with a key in common have a prefix in common."""
    min_version: int
    granted: "asyncio.Future[_Engine]"


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
        self._engines: dict[tuple[str, str], _Engine] = {}
        self._homes: OrderedDict[Hashable, _Engine] = OrderedDict()
        self._queue: deque[_Waiting] = deque()
        self._name, self._numbers = uuid.uuid4().hex, itertools.count()
        """Make the rids, which no other pool of an engine has."""
        self._chores = set[asyncio.Task[None]]()

    # Engines.

    def enlist(self, states: dict[Endpoint, EngineState]) -> None:
        """Takes the state of every engine there is; one that is left out is lost."""
        known = {(at.id, at.start): (at, state) for at, state in states.items()}
        for key, (endpoint, state) in known.items():
            if key not in self._engines and state != "lost":
                self._engines[key] = _Engine(endpoint, self._connect(endpoint), self._most)
        ready = list[_Engine]()
        for key, engine in list(self._engines.items()):
            before, engine.state = engine.state, known[key][1] if key in known else "lost"
            if engine.state == "lost":
                self._forget(engine)
            elif engine.state == "serving" != before:
                engine.serves_since = time.monotonic()
                ready.append(engine)
        self._consider(*ready)
        self._grant()

    @property
    def in_flight(self) -> dict[str, int]:
        """Samples under way, by engine id."""
        return {engine.endpoint.id: len(engine.in_flight) for engine in self._engines.values()}

    @property
    def loads(self) -> list[EngineLoad]:
        """The work of every engine for this pool."""
        return [
            EngineLoad(e.endpoint.id, e.client.num_tokens, len(e.in_flight), e.version, e.kv_used)
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

        async def fit(engine: _Engine) -> None:
            try:
                load = await engine.client.load()
            except EngineError as error:
                log.debug("%s", error)
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
                it has room it goes to the engine that has served one of them.
            draft: what there is already; it grows while the response arrives.

        Raises:
            EngineError: refused, or got nowhere for `patience_s`.
        """
        draft, since = Draft() if draft is None else draft, time.monotonic()
        while True:
            held, rid = len(draft.token_ids), f"{self._name}-{next(self._numbers)}"
            # Where nobody waits, nobody is passed over.
            engine = None if self._queue else self._choose(rid, homes, min_version)
            if engine is None:
                waiting = self._line_up(rid, homes, min_version, first=held > 0)
                engine = await self._wait(waiting, since)
            try:
                if not engine.is_known():
                    await self._look(engine)
                done = await engine.client.sample(
                    prompt, seed, sampling, version=engine.version, draft=draft, rid=rid
                )
            except EngineLostError as error:
                self._failed(engine, error)
            else:
                engine.failures = 0
                if done.finish is not FinishReason.ABORT:
                    return done
            finally:
                engine.in_flight.discard(rid)
                self._grant()
            if len(draft.token_ids) >= sampling.max_new_tokens:
                return draft.finished(FinishReason.LENGTH)
            if len(draft.token_ids) > held:
                since = time.monotonic()

    def _line_up(
        self, rid: str, homes: Sequence[Hashable], min_version: int, *, first: bool
    ) -> _Waiting:
        """Takes a place in the queue; who has something to lose goes first."""
        granted: asyncio.Future[_Engine] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(rid, homes, min_version, granted)
        (self._queue.appendleft if first else self._queue.append)(waiting)
        return waiting

    async def _wait(self, waiting: _Waiting, since: float) -> _Engine:
        try:
            self._grant()
            while not waiting.granted.done():
                if any(engine.in_flight for engine in self._engines.values()):
                    since = time.monotonic()  # they get on, or break off after a silence
                left = since + self._patience_s - time.monotonic()
                if left <= 0:
                    raise EngineError(self._explain(waiting.min_version))
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
        while self._queue and any(engine.takes(0) for engine in self._usable()):
            waiting = self._queue.popleft()
            if waiting.granted.done():  # withdrawn
                continue
            if engine := self._choose(waiting.rid, waiting.homes, waiting.min_version):
                waiting.granted.set_result(engine)
            else:
                kept.append(waiting)
        self._queue.extendleft(reversed(kept))

    def _choose(self, rid: str, homes: Sequence[Hashable], min_version: int) -> _Engine | None:
        """Gives a place in an engine to a request, if there is one."""
        for home in homes:
            best = self._homes.get(home)
            if best is not None and best.takes(min_version):
                break
        else:
            able = [engine for engine in self._usable() if engine.takes(min_version)]
            if not able:
                return None
            best = min(able, key=lambda e: (len(e.in_flight) / e.limit, len(e.in_flight)))
        self._settle(homes, best)
        best.in_flight.add(rid)
        return best

    def _settle(self, homes: Sequence[Hashable], engine: _Engine) -> None:
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

    def _consider(self, *engines: _Engine) -> None:
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
        task.add_done_callback(self._chores.discard)

    async def _look(self, engine: _Engine) -> None:
        """Brings what is known of an engine's version up to date."""
        async with engine.asking:
            if engine.is_known():
                return
            try:
                engine.version = await engine.client.version()
            except EngineError as error:
                self._failed(engine, error)
            engine.asked_at = time.monotonic()

    def _failed(self, engine: _Engine, error: EngineError) -> None:
        if engine.state == "lost" or time.monotonic() < engine.not_before:
            return  # what ended with it is no further failure
        pause = min(_PAUSE_S * 2**engine.failures, _LONGEST_PAUSE_S)
        engine.failures += 1
        engine.not_before = time.monotonic() + pause
        log.warning("engine %s: %s; leaving it alone for %g s", engine.endpoint.id, error, pause)
        asyncio.get_running_loop().call_later(pause, self._consider, engine)

    def _forget(self, engine: _Engine) -> None:
        engine.state = "lost"
        self._begin(engine.client.aclose())
        del self._engines[engine.endpoint.id, engine.endpoint.start]
        for home in [home for home, at in self._homes.items() if at is engine]:
            del self._homes[home]

    def _usable(self) -> list[_Engine]:
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


def next_limit(limit: int, load: Load, in_flight: int, most: int) -> int:
    """Returns how many requests may be in flight at an engine.

    An engine whose cache is full throws requests out and computes them again. So their number falls
    by a tenth while it is nearly full, and grows by an eighth while there is space and no queue.
    """
    if load.kv_used > 0.95:
        return max(1, min(limit, in_flight) * 9 // 10)
    if load.kv_used < 0.85 and load.waiting == 0:
        return min(most, limit + max(1, limit // 8))
    return min(limit, most)
