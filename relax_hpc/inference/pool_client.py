"""Samples with a pool of engines, from any task of the job or process that a task starts.

It reads the engines to use from records, once a second (four times during an update): a member
record per engine and, if the pool follows the policy, the newest roster, which names the engines
with the newest version. Engines of other pools serve as soon as they are healthy. It also reports
the load of engines, and rests those that are much slower than the others (a hot GPU, a busy disk).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

from relax_hpc.config.engines import ROLLOUT, EnginePool, follows_policy
from relax_hpc.config.job_file import read_resolved
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError, PeerTimeoutError
from relax_hpc.inference import members
from relax_hpc.inference.generation import (
    Counts,
    Draft,
    Generation,
    GenerationClient,
    Sampling,
)
from relax_hpc.inference.members import Member, Roster, follow_roster, standing
from relax_hpc.inference.pool import Endpoint, EngineLoad, EngineState, Pool
from relax_hpc.inference.switches import Switches
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter

log = logging.getLogger(__name__)

LOAD_EVERY_S = 5.0
"""Seconds between two `load` events of an engine."""


class LoadMeter:
    """Records what engines did since the last time."""

    def __init__(self, events: EventWriter, *, every_s: float = LOAD_EVERY_S) -> None:
        self._events, self._every_s = events, every_s
        self._since = time.monotonic()
        self._counts: dict[str, Counts] = {}

    def note(self, loads: Sequence[EngineLoad], *, last: bool = False) -> None:
        """Writes a `load` event per engine, if it is due or the `last`."""
        seconds = time.monotonic() - self._since
        if seconds < self._every_s and not last:
            return
        for load in loads:
            # An engine that was started again counts from 0.
            before = self._counts.get(load.id, Counts())
            if before.num_tokens > load.counts.num_tokens:
                before = Counts()
            fields = load._asdict() | load.counts.minus(before)._asdict()
            del fields["counts"]
            self._events.emit("load", seconds=seconds, **fields)
        self._counts = {load.id: load.counts for load in loads}
        self._since = time.monotonic()


_SLOW, _FEWEST = 0.5, 3
_WINDOW_S, _LEAST_S = 60.0, 30.0
REST_S = 600.0
"""Seconds for which a slow engine gets no new requests; then it is retried."""


class SlowEngine(NamedTuple):
    id: str
    rate: float
    median: float
    """Median over engines."""


def slow(rates: Mapping[str, float]) -> list[SlowEngine]:
    """Returns the engines below half of the median; of two engines neither counts as slow.

    Args:
        rates: tokens per second and request of each engine.
    """
    if len(rates) < _FEWEST:
        return []
    middle = median(rates.values())
    return [SlowEngine(name, rate, middle) for name, rate in rates.items() if rate < _SLOW * middle]


class _Look(NamedTuple):
    """The work of an engine since the last sample."""

    time: float
    num_tokens: int
    busy_s: float
    """Seconds times requests in flight."""


class SlowEngines:
    """Watches loads, and rests engines that are slow for a minute."""

    def __init__(self) -> None:
        self._looks: dict[str, deque[_Look]] = {}
        self._before: dict[str, EngineLoad] = {}
        self._at = time.monotonic()
        self._until: dict[str, float] = {}

    @property
    def resting(self) -> frozenset[str]:
        return frozenset(self._until)

    def look(self, loads: Sequence["EngineLoad"]) -> list[SlowEngine]:
        """Takes the current loads. Returns the engines that rest from now on."""
        now = time.monotonic()
        for load in loads:
            self._note(load, now)
        self._before, self._at = {load.id: load for load in loads}, now
        self._until = {id: at for id, at in self._until.items() if at > now and id in self._before}
        found = [each for each in slow(self._rates(now)) if each.id not in self._until]
        for each in found:
            self._until[each.id] = now + REST_S
            del self._looks[each.id]
        return found

    def _note(self, load: "EngineLoad", now: float) -> None:
        before = self._before.get(load.id)
        new = load.counts.num_tokens - (before.counts.num_tokens if before else 0)
        if before is None or new < 0:  # it is there for the first time, or was started again
            self._looks.pop(load.id, None)
            return
        busy_s = (now - self._at) * (before.in_flight + load.in_flight) / 2
        self._looks.setdefault(load.id, deque()).append(_Look(now, new, busy_s))

    def _rates(self, now: float) -> dict[str, float]:
        """Returns the rates of engines that were busy for half of the last minute."""
        rates = {}
        for name in self._before:
            looks = self._looks.get(name, deque())
            while looks and looks[0].time <= now - _WINDOW_S:
                looks.popleft()
            busy_s = sum(look.busy_s for look in looks)
            if looks and now - looks[0].time >= _LEAST_S and busy_s >= _LEAST_S:
                rates[name] = sum(look.num_tokens for look in looks) / busy_s
        return rates


_LOOK_S, _LOOK_DURING_UPDATE_S = 1.0, 0.25
_ADDED = "extra-"
"""Added engines serve every rollout task."""


class PoolClient:
    """Samples with the engines of one pool. An asynchronous context manager."""

    def __init__(
        self,
        paths: RunPaths,
        name: str,
        pool: EnginePool,
        ids: Sequence[str],
        *,
        stop_token: int,
        patience_s: float,
        serves_at_once: bool,
        events: EventWriter | None,
    ) -> None:
        """Calls no engine before it is entered.

        Args:
            ids: members to use; added ones join if the pool follows the policy.
            patience_s: longest time without an engine, and longest silence of one.
            serves_at_once: whether `ids` serve before the first update of weights.
            events: get the load of the engines at intervals.
        """
        self._paths, self._name, self._ids, self._stop_token = paths, name, ids, stop_token
        self._roster, self._members = follow_roster(paths), members.follow(paths)
        self._follows, self._serves_at_once = follows_policy(name), serves_at_once
        self._patience_s, self._secret = patience_s, RunSecret.read(paths.secret)

        def connect(at: Endpoint) -> GenerationClient:
            switches = None
            if self._follows and pool.kind == "sglang":
                switches = Switches(paths, at.id, at.start)
            return GenerationClient(at.url, at.token, silence_s=patience_s, switches=switches)

        self._pool = Pool(connect, max_in_flight=pool.max_running_requests, patience_s=patience_s)
        self._meter = LoadMeter(events) if events else None
        self._slow = SlowEngines() if pool.advanced.drain_slow else None
        self._events = events
        self._watch: asyncio.Task[None] | None = None
        # Its own: those of the loop may all be busy with what environments do.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"looks for {name}")
        self._served_at = time.monotonic()

    async def __aenter__(self) -> Self:
        await self._look()
        self._watch = asyncio.create_task(self._look_again())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watch:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._meter:
            self._meter.note(self._pool.loads, last=True)
        await self._pool.aclose()
        self._thread.shutdown(wait=False)

    async def version(self) -> int | None:
        """Returns the oldest policy that may sample now; None while there is no engine.

        Raises:
            PeerTimeoutError: there was none for `patience_s`.
        """
        self._check_watch()
        version = await self._pool.version()
        if version is not None:
            self._served_at = time.monotonic()
        elif time.monotonic() - self._served_at > self._patience_s:
            raise PeerTimeoutError(
                f"{', '.join(self._ids)}: no engine with the newest weights for "
                f"{self._patience_s:g} s; see its log, and the actor's for the last update"
            )
        return version

    def sample(
        self,
        given: Sequence[int],
        draft: Draft,
        how: Sampling,
        *,
        seed: int,
        homes: Sequence[Hashable],
    ) -> Coroutine[Any, Any, Generation]:
        """Implements `environments.session.Sampler`."""
        self._check_watch()
        if not how.ignore_eos:
            how = how._replace(stop_token_ids=(self._stop_token,))
        return self._pool.sample(given, seed, how, homes=homes, draft=draft)

    async def complete(
        self, given: Sequence[int], max_new_tokens: int, *, temperature: float = 0.0, seed: int = 0
    ) -> Generation:
        """Samples one response without a record, e.g. a judge's verdict.

        Args:
            given: token ids.
            max_new_tokens: limit of the response.
            temperature: 0 is greedy.

        Raises:
            EngineError: no engine was available for `patience_s`.
        """
        self._check_watch()
        sampling = Sampling(temperature, max_new_tokens, (self._stop_token,))
        return await self._pool.sample(given, seed, sampling)

    def _check_watch(self) -> None:
        if self._watch and self._watch.done():
            self._watch.result()

    async def _look_again(self) -> None:
        while True:
            updating = await self._look()
            await asyncio.sleep(_LOOK_DURING_UPDATE_S if updating else _LOOK_S)
            await self._pool.adapt()
            if self._meter:
                self._meter.note(self._pool.loads)
            if self._slow:
                self._rest(self._slow)

    def _rest(self, engines: SlowEngines) -> None:
        for found in engines.look(self._pool.loads):
            log.warning(
                "engine %s samples %.3g tokens/s per request, the median engine %.3g: it is asked "
                "nothing new for %.0f s",
                *found,
                REST_S,
            )
            if self._events:
                self._events.emit("rests", seconds=REST_S, **found._asdict())
        self._pool.rest(engines.resting)

    async def _look(self) -> bool:
        """Updates the pool. Returns whether its engines will soon serve again."""
        loop = asyncio.get_running_loop()
        held = await loop.run_in_executor(self._thread, self._roster) if self._follows else None
        states_of = partial(self._engine_states, held)
        self._pool.enlist(await loop.run_in_executor(self._thread, states_of))
        if held is None:
            return False
        states = {held.members[name].state for name in self._ids if name in held.members}
        if "ASLEEP" in states:
            self._served_at = time.monotonic()  # the trainer has its GPUs, and gives them back
            self._pool.excuse()
        return not states.isdisjoint({"ASLEEP", "SYNCING"})

    def _engine_states(self, held: Roster | None) -> dict[Endpoint, EngineState]:
        added = [name for name in (held.members if held else ()) if name.startswith(_ADDED)]
        found = self._members.get(*self._ids, *added)
        return {
            Endpoint(
                member.id,
                member.start,
                member.url,
                self._secret.engine_token(member.id, member.start),
            ): engine_state(member, held, own=self._serves_at_once and member.id in self._ids)
            for member in found
            if member is not None and member.url and member.pool == self._name
        }


def client_of(
    config: RunConfig,
    paths: RunPaths,
    name: str = ROLLOUT,
    *,
    stop_token: int,
    own: Sequence[str] | None = None,
    events: EventWriter | None = None,
) -> PoolClient:
    """Returns a client of a pool that the job declares.

    Args:
        own: the engines to use; by default all that the pool starts with.
        events: get the load of the engines at intervals.

    Raises:
        ConfigError: the job has no such pool.
    """
    if name not in config.engines:
        raise ConfigError(
            f"engines.{name}: the job has no such pool, it has {', '.join(config.engines)}; add "
            f"a table [engines.{name}]"
        )
    pool = config.engines[name]
    # Policy 0 is not what an engine begins with where it has other weights than the folder's.
    is_of_folder = config.weights.quantize == "none" and config.model.weights is None
    serves_at_once = not follows_policy(name) or is_of_folder
    return PoolClient(
        paths,
        name,
        pool,
        config.engines_in(name) if own is None else own,
        stop_token=stop_token,
        patience_s=config.launch.advanced.peer_timeout_s,
        serves_at_once=serves_at_once,
        events=events,
    )


def open_pool(run_dir: Path, name: str, *, stop_token: int) -> PoolClient:
    """Returns a client of a pool for a process that only knows the run directory.

    Raises:
        ConfigError: no run directory, or its job has no such pool.
    """
    paths = RunPaths(run_dir)
    config = read_resolved(paths.config)
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{run_dir}: a job with [sft] has no engines")
    return client_of(config, paths, name, stop_token=stop_token)


def engine_state(member: Member, roster: Roster | None, *, own: bool) -> EngineState:
    """Returns how the pool may use an engine.

    Before the first update an engine has the first policy. Pools with fixed weights have no roster:
    their `own` engines serve as they are, others do not.
    """
    found = standing(member, roster)
    if found == "ACTIVE" or (found == "HEALTHY" and roster is None and own):
        return "serving"
    # Its owner hands back, at a deadline, what one that drains has not finished.
    return "held" if found in ("HEALTHY", "SYNCING", "ASLEEP", "DRAINING") else "lost"
