"""An engine as a pool sees it: what it is asked, how much at once, and what is known of it."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from relax_hpc.engines.generation import GenerationClient
from relax_hpc.engines.response import Counts, Load

_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_VERSION_AGE_S = 0.05
"""Age up to which what is known of an engine's version is believed."""


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
    counts: Counts
    """Tokens and media that it was asked for and gave, since it was enlisted."""
    in_flight: int
    version: int
    """Policy version when last seen; -1 if it never said."""
    kv_used: float | None
    """Fraction of the key-value cache in use, by whomever; None if it does not say."""


@dataclass(eq=False, slots=True)
class PoolEngine:
    """One start of an engine, and what a pool knows of it."""

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
    rests: bool = False
    """Gets nothing new for now."""

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
        has_room = not self.rests and len(self.in_flight) < self.limit
        return self.usable and has_room and self.version >= max(min_version, 0)


def pause_s(failures: int) -> float:
    """Seconds to wait after so many failures before: each time twice as long."""
    return min(_PAUSE_S * 2.0 ** min(failures, 32), _LONGEST_PAUSE_S)


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
