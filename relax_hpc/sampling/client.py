"""A pool of engines as one: for every task of the job, and every process that such a task starts.

Whom it may ask stands in records, which are looked at once a second (four times while an update is
under way): a member record per engine, and of a pool whose weights follow the policy the newest
roster, which says who holds the newest version. Other pools serve as soon as they are healthy.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

from relax_hpc.config.engines import ROLLOUT, EnginePool, follows_policy
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.generation import GenerationClient
from relax_hpc.engines.pool import Pool
from relax_hpc.engines.pool_engine import Endpoint, EngineState
from relax_hpc.engines.response import Draft, Generation, Sampling
from relax_hpc.errors import ConfigError, PeerTimeoutError
from relax_hpc.fleet import members, roster
from relax_hpc.fleet.members import Member
from relax_hpc.fleet.roster import Roster
from relax_hpc.fleet.switches import Switches
from relax_hpc.job_file import read_resolved
from relax_hpc.paths import RunPaths
from relax_hpc.run_secret import RunSecret
from relax_hpc.sampling.how import How
from relax_hpc.sampling.load import LoadMeter
from relax_hpc.sampling.slow import REST_S, SlowEngines
from relax_hpc.telemetry.events import EventWriter

log = logging.getLogger(__name__)

_LOOK_S, _LOOK_DURING_UPDATE_S = 1.0, 0.25
_ADDED = "extra-"
"""Engines that were added serve every rollout task."""


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
        """Asks nobody before it is entered.

        Args:
            paths: where the records are.
            name: of the pool.
            pool: its settings.
            ids: members that it looks for; of a pool that follows the policy those that were added
                come to them.
            stop_token: ends a response.
            patience_s: how long there may be no engine, and how long one may say nothing.
            serves_at_once: whether `ids` may be asked before the first update of weights.
            events: get the load of the engines now and then.
        """
        self._paths, self._name, self._ids, self._stop_token = paths, name, ids, stop_token
        self._roster, self._members = roster.follow(paths), members.follow(paths)
        self._follows, self._serves_at_once = follows_policy(name), serves_at_once
        self._patience_s, self._secret = patience_s, RunSecret.read(paths.secret)

        def connect(at: Endpoint) -> GenerationClient:
            switches = None
            if self._follows and pool.kind == "sglang":
                switches = Switches(paths, at.id, at.start)
            return GenerationClient(at.url, at.token, silence_s=patience_s, switches=switches)

        self._pool = Pool(connect, max_in_flight=pool.max_running_requests, patience_s=patience_s)
        self._meter = LoadMeter(events) if events else None
        self._slow = SlowEngines() if pool.drain_slow else None
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
        """The oldest policy that a sample may be given to now; None while there is no engine.

        Raises:
            PeerTimeoutError: there was none for as long as patience lasts.
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
        how: How,
        *,
        seed: int,
        homes: Sequence[Hashable],
    ) -> Coroutine[Any, Any, Generation]:
        """Samples as `environments.session.Sampler` says."""
        self._check_watch()
        sampling = Sampling(
            how.temperature,
            how.max_new_tokens,
            () if how.ignore_eos else (self._stop_token,),
            ignore_eos=how.ignore_eos,
            routed_experts=how.routed_experts,
            top_p=how.top_p,
            top_k=how.top_k,
            end=how.end,
            view=how.view,
        )
        return self._pool.sample(
            given, seed, sampling, min_version=how.min_version, homes=homes, draft=draft
        )

    async def complete(
        self, given: Sequence[int], max_new_tokens: int, *, temperature: float = 0.0, seed: int = 0
    ) -> Generation:
        """One response to one prompt, for who keeps no record of it: a judge's verdict, say.

        Args:
            given: token ids.
            max_new_tokens: the response ends there at the latest.
            temperature: 0 is greedy.
            seed: of its random numbers.

        Raises:
            EngineError: no engine could be asked for as long as patience lasts.
        """
        self._check_watch()
        sampling = Sampling(temperature, max_new_tokens, (self._stop_token,))
        return await self._pool.sample(
            given, seed, sampling, min_version=0, homes=(), draft=Draft()
        )

    def _check_watch(self) -> None:
        """Raises what the looks at the records have ended with."""
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
        """Asks nothing new of those that are slow."""
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
        """Brings the pool up to date. Returns whether its engines will soon serve again."""
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
            self._endpoint(member): self._state_of(member, held)
            for member in found
            if member is not None and member.url and member.pool == self._name
        }

    def _state_of(self, member: Member, held: Roster | None) -> EngineState:
        own = member.id in self._ids and self._serves_at_once
        return engine_state(member, held, own=own)

    def _endpoint(self, member: Member) -> Endpoint:
        token = self._secret.engine_token(member.id, member.start)
        return Endpoint(member.id, member.start, member.url, token)


def client_of(
    config: RunConfig,
    paths: RunPaths,
    name: str = ROLLOUT,
    *,
    stop_token: int,
    own: Sequence[str] | None = None,
    events: EventWriter | None = None,
) -> PoolClient:
    """A client of a pool that the job declares.

    Args:
        config: of the run.
        paths: of the run.
        name: of the pool.
        stop_token: ends a response.
        own: the engines to ask; unset is all that the pool starts with.
        events: get the load of the engines now and then.

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
        patience_s=config.launch.peer_timeout_s,
        serves_at_once=serves_at_once,
        events=events,
    )


def open_pool(run_dir: Path, name: str, *, stop_token: int) -> PoolClient:
    """A client of a pool for a process that knows no more than where the run is.

    Raises:
        ConfigError: no run directory, or its job has no such pool.
    """
    paths = RunPaths(run_dir)
    config = read_resolved(paths.config)
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{run_dir}: a job with [sft] has no engines")
    return client_of(config, paths, name, stop_token=stop_token)


def engine_state(member: Member, roster: Roster | None, *, own: bool) -> EngineState:
    """Returns what may be done with an engine.

    Before the first update an engine has the first policy, and where weights stay as they are there
    is no roster: those in question are used as they are (`own`), others are not.
    """
    if member.state == "DRAINING":
        return "held"  # its owner hands back, at a deadline, what it has not finished
    if member.state != "HEALTHY":
        return "lost"
    if roster is None:
        return "serving" if own else "held"
    entry = roster.members.get(member.id)
    if entry is not None and (entry.start, entry.state) == (member.start, "FENCED"):
        return "lost"
    return "serving" if roster.serves(member.id, member.start) else "held"
