"""Which engines a rollout task may ask: those whose records say that they hold the newest policy.

Its own engines, and engines that were added to the run, which serve every rollout task. The records
are looked at once a second (four times while an update is under way): the newest roster, and a
member record per engine.
"""

import asyncio
import time
from collections.abc import Hashable, Sequence
from typing import Self

from relax_hpc.config.run import RunConfig
from relax_hpc.engines.generation import Draft, Generation, GenerationClient, Sampling
from relax_hpc.engines.pool import Endpoint, EngineLoad, Pool, Standing
from relax_hpc.environments.session import How
from relax_hpc.errors import PeerTimeoutError
from relax_hpc.fleet import members
from relax_hpc.fleet.members import Member
from relax_hpc.fleet.roster import Roster
from relax_hpc.fleet.switches import Switches
from relax_hpc.paths import RunPaths
from relax_hpc.run_secret import RunSecret
from relax_hpc.telemetry.events import EventWriter

_LOOK_S, _LOOK_DURING_UPDATE_S = 1.0, 0.25
_EXTRA = "extra-"


class EngineSampler:
    """The engines of a rollout task, with the run's sampling settings filled in."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        own: Sequence[str],
        stop_token: int,
        events: EventWriter,
    ) -> None:
        """Asks nobody before it is entered.

        Args:
            config: sampling settings and deadlines.
            paths: where the records are.
            own: member ids of the task's own engines.
            stop_token: ends a response.
            events: get the load of the engines now and then.
        """
        self._config, self._paths, self._own, self._stop_token = config, paths, own, stop_token
        self._secret = RunSecret.read(paths.secret)
        self._has_policy_0 = config.weights.quantize == "none"  # else it begins without weights
        pool, patience_s = config.rollout_pool, config.launch.peer_timeout_s

        def connect(at: Endpoint) -> GenerationClient:
            switches = Switches(paths, at.id, at.epoch) if pool.kind == "sglang" else None
            return GenerationClient(at.url, at.token, silence_s=patience_s, switches=switches)

        self._pool = Pool(connect, max_in_flight=pool.max_running_requests, patience_s=patience_s)
        self._meter = LoadMeter(events, every_s=pool.load_every_s)
        self._watch: asyncio.Task[None] | None = None
        self._served_at = time.monotonic()

    async def __aenter__(self) -> Self:
        await self._look()
        self._watch = asyncio.create_task(self._look_again())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watch:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        self._meter.note(self._pool.loads, last=True)
        await self._pool.aclose()

    async def version(self) -> int | None:
        """The oldest policy that a sample may be given to now; None while there is no engine.

        Raises:
            PeerTimeoutError: there was none for `launch.peer_timeout_s`.
        """
        if self._watch and self._watch.done():
            self._watch.result()
        version = await self._pool.version()
        if version is not None:
            self._served_at = time.monotonic()
        elif time.monotonic() - self._served_at > (limit := self._config.launch.peer_timeout_s):
            raise PeerTimeoutError(
                f"{', '.join(self._own)}: no engine with the newest weights for {limit:g} s; "
                "see its log, and the actor's for the last update"
            )
        return version

    async def sample(
        self,
        given: Sequence[int],
        draft: Draft,
        how: How,
        *,
        seed: int,
        homes: Sequence[Hashable],
    ) -> Generation:
        """As `environments.session.Sampler` says."""
        sampling = Sampling(
            how.temperature,
            how.max_new_tokens,
            (self._stop_token,),
            routed_experts=how.routed_experts,
        )
        return await self._pool.sample(
            given, seed, sampling, min_version=how.min_version, homes=homes, draft=draft
        )

    async def _look_again(self) -> None:
        while True:
            updating = await self._look()
            await asyncio.sleep(_LOOK_DURING_UPDATE_S if updating else _LOOK_S)
            await self._pool.adapt()
            self._meter.note(self._pool.loads)

    async def _look(self) -> bool:
        """Brings the pool up to date. Returns whether its own engines will soon serve again."""
        roster = await asyncio.to_thread(Roster.read, self._paths)
        self._pool.enlist(await asyncio.to_thread(self._standings, roster))
        if roster is None:
            return False
        own = {roster.members[name].state for name in self._own if name in roster.members}
        if "ASLEEP" in own:
            self._served_at = time.monotonic()  # the trainer has its GPUs, and gives them back
        return not own.isdisjoint({"ASLEEP", "SYNCING"})

    def _standings(self, roster: Roster | None) -> dict[Endpoint, Standing]:
        extra = [name for name in (roster.members if roster else ()) if name.startswith(_EXTRA)]
        found = [members.find(self._paths, name) for name in (*self._own, *extra)]
        return {
            self._endpoint(member): standing(
                member, roster, own=member.id in self._own and self._has_policy_0
            )
            for member in found
            if member is not None and member.url
        }

    def _endpoint(self, member: Member) -> Endpoint:
        token = self._secret.engine_token(member.id, member.epoch)
        return Endpoint(member.id, member.epoch, member.url, token)


class LoadMeter:
    """Writes down what engines did since the last time."""

    def __init__(self, events: EventWriter, *, every_s: float) -> None:
        """`every_s` 0: never."""
        self._events, self._every_s = events, every_s
        self._since = time.monotonic()
        self._num_tokens: dict[str, int] = {}

    def note(self, loads: Sequence[EngineLoad], *, last: bool = False) -> None:
        """A `load` event per engine, if it is time to or there is no other time."""
        seconds = time.monotonic() - self._since
        if not self._every_s or (seconds < self._every_s and not last):
            return
        for load in loads:
            # An engine that was started again counts from 0.
            before = self._num_tokens.get(load.id, 0)
            new = load.num_tokens - (before if before <= load.num_tokens else 0)
            self._events.emit("load", seconds=seconds, **load._asdict() | {"num_tokens": new})
        self._num_tokens = {load.id: load.num_tokens for load in loads}
        self._since = time.monotonic()


def standing(member: Member, roster: Roster | None, *, own: bool) -> Standing:
    """What a rollout task may do with an engine.

    Before the first update an engine has the first policy: the task's own engines are used as
    they are (`own`), others are not.
    """
    if member.state == "DRAINING":
        return "held"  # its owner hands back, at a deadline, what it has not finished
    if member.state != "HEALTHY":
        return "lost"
    if roster is None:
        return "serving" if own else "held"
    holding = roster.members.get(member.id)
    if holding is not None and (holding.epoch, holding.state) == (member.epoch, "FENCED"):
        return "lost"
    return "serving" if roster.serves(member.id, member.epoch) else "held"
