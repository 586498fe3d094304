"""A request, the attempts to have it answered, and what becomes of one that ends engines.

What an ended engine was at goes on elsewhere: a request that ends each engine ends one after the
other, and whoever was sampled beside it cannot be told from it. So requests that engines have ended
with twice, before a token of them came, are asked for one at a time.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from relax_hpc.engines.leads import Computed
from relax_hpc.engines.pool_engine import PoolEngine, pause_s
from relax_hpc.engines.response import Draft, Sampling
from relax_hpc.errors import DeadlyRequestError

MOST_FAULTS = 16
"""Answers without a token that a sample may get in a row, which takes a minute."""
SUSPECT, DEADLY = 2, 3
"""Engines that have broken a request off in a row without a token of it, from which on it is asked
for by itself; and that have ended with it, the last one while it was, so that it is given up."""
_KNOWN_S, _LOOK_S = 15.0, 0.05
"""Time within which it is told whether an engine has ended, and between looks."""
_LONG = 1024
"""Tokens of a prompt that siblings wait for; with media, all do."""


class Request(NamedTuple):
    """A response that is wanted, by whichever engines."""

    asked: tuple[Sequence[int], int, Sampling]
    """Prompt, seed, and how."""
    min_version: int
    homes: Sequence[Hashable]
    """Keys of its prefixes: requests with a key in common have a prefix in common."""

    @property
    def prefix(self) -> Hashable | None:
        """The key of what its siblings wait for, if that takes an engine long."""
        prompt, _, how = self.asked
        is_long = how.view is not None or len(prompt) >= _LONG
        return self.group if is_long else None

    @property
    def group(self) -> Hashable:
        """The key of whoever begins likewise; None if nobody else does."""
        return self.homes[-1] if self.homes else None


class Attempts:
    """The attempts in a row to sample something that brought no token of it."""

    def __init__(self) -> None:
        self._number, self._faults, self._why = 0, 0, ""
        self.by = set[PoolEngine]()
        """Engines that failed, which are asked again where no other has room."""
        self.lost, self.lost_alone = set[PoolEngine](), set[PoolEngine]()
        """Engines that broke it off; those that did while it was `alone`."""
        self.alone = False
        """No other request under way was broken off as often; see `Suspects`."""

    def note_fault(self, engine: PoolEngine, why: str) -> None:
        """Takes one more: the engine answered that it failed, or aborted it by itself."""
        self._number, self._faults, self._why = self._number + 1, self._faults + 1, why
        self.by.add(engine)

    def note_loss(self, engine: PoolEngine, *, was_there: bool) -> None:
        """Takes one more: the engine gave no answer. If it `was_there` just before, it may have
        ended with it."""
        self._number += 1
        if was_there:
            self.lost.add(engine)
            if self.alone:
                self.lost_alone.add(engine)

    @property
    def ended(self) -> list[PoolEngine]:
        """Lost engines that are gone by now, by ids and starts."""
        return sorted((e for e in self.lost if e.state == "lost"), key=lambda e: e.endpoint)

    @property
    def pause_s(self) -> float:
        """Seconds until the next one."""
        return pause_s(self._number - 1)

    def are_enough(self, serving: Collection[PoolEngine]) -> bool:
        """Whether no other engine is worth another one: several have failed, or all there are."""
        several = len(self.by) > 1 or (bool(serving) and self.by.issuperset(serving))
        return several and self._faults >= MOST_FAULTS

    def __str__(self) -> str:
        engines = sorted({engine.endpoint.id for engine in self.by})
        return f"{self._why}; no token in {self._faults} answers of {', '.join(engines)}"


class Suspects:
    """The requests of a pool that were broken off more than once before a token came."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._deadly = dict[Hashable, str]()
        """Findings of requests by name: siblings need not end further engines."""

    @asynccontextmanager
    async def turn(
        self, request: Request, draft: Draft, attempts: Attempts
    ) -> AsyncIterator[Computed]:
        """Waits while another suspect is under way, if this request is one; yields what gives way
        to the next, to be called once a token has come. The end of the block does so, too.

        Args:
            request: that is to be asked for.
            draft: what there is of its response.
            attempts: to get more of it.
        """
        if len(attempts.lost) < SUSPECT:
            yield lambda: None
            return
        await self._one.acquire()
        attempts.alone = True

        def cleared() -> None:
            if attempts.alone:
                attempts.alone = False
                self._one.release()

        try:
            yield cleared
            if attempts.alone and attempts.lost_alone:
                await self._judge(request, draft, attempts)
        finally:
            cleared()

    async def _judge(self, request: Request, draft: Draft, attempts: Attempts) -> None:
        """Notes whether engines ended with a request, once that is known of those it had alone."""
        deadline = time.monotonic() + _KNOWN_S
        while any(each.state != "lost" for each in attempts.lost_alone):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_LOOK_S)
        ended = attempts.ended
        if len(ended) >= DEADLY and not attempts.lost_alone.isdisjoint(ended):
            names = ", ".join(f"{each.endpoint.id} ({each.endpoint.start})" for each in ended)
            said = f"{len(ended)} engines ended when they were asked for it: {names}"
            self._deadly[_asked(request, draft)] = said

    def refuse(self, request: Request, draft: Draft) -> None:
        """Gives a request up that engines end with.

        Raises:
            DeadlyRequestError: they ended with this one, or with a sibling that was as far.
        """
        if self._deadly and (found := self._deadly.get(_asked(request, draft))) is not None:
            raise DeadlyRequestError(found)


def _asked(request: Request, draft: Draft) -> Hashable:
    """Names what engines are given: siblings that have the same tokens have the same name."""
    return request.group, (*request.asked[0], *draft.token_ids)
