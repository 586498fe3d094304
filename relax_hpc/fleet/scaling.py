"""Records below control/scale: requests, written once by `relax-hpc scale`; the scaler's state."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from relax_hpc.comm.process_id import ProcessId
from relax_hpc.config.rollout import Transport
from relax_hpc.fleet.seen import Seen
from relax_hpc.fleet.standing import ENDED, Standing
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json

Kind = Literal["out", "in"]


@dataclass(frozen=True, slots=True)
class Request:
    """A request to scale. The target is absolute, so asking twice is asking once."""

    id: int
    kind: Kind
    engines: int
    """Engines that the run shall have in all, those it started with included."""
    member: str | None
    """The one to be removed; None leaves the choice to the scaler."""
    drain_s: float
    """Time that requests which run in a removed engine may take to end there."""
    time: float
    transport: Transport | None = None
    """The way in which weights get to engines that are added; None: as `weights.transport` says."""

    @classmethod
    def read(cls, paths: RunPaths, number: int) -> Self | None:
        record = read_json(paths.scale_request(number))
        return None if record is None else cls(**record)

    @staticmethod
    def follow(paths: RunPaths) -> "Callable[[int], Request | None]":
        """Does as `read`, for who asks again and again for the next one."""
        seen = Seen(paths.scale, lambda number: Request.read(paths, int(number)))
        return lambda number: seen.get(str(number))[0]

    def asks_the_same(self, other: "Request") -> bool:
        mine, others = (
            (each.kind, each.engines, each.member, each.transport) for each in (self, other)
        )
        return mine == others

    def __str__(self) -> str:
        engines = f"{self.engines} engine{'s' if self.engines > 1 else ''}"
        what = f"without {self.member}" if self.member else f"to {engines}"
        how = f", weights by {self.transport}" if self.transport else ""
        return f"request {self.id} (scale {self.kind} {what}{how})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state of a request, and what a rollback of it needs."""

    state: Literal["PENDING", "DONE", "FAILED", "CANCELLED"]
    before: int
    """The target that it replaced, and that a rollback returns to."""
    reason: str = ""

    @property
    def final(self) -> bool:
        return self.state != "PENDING"


@dataclass(frozen=True, slots=True)
class Extra:
    """An engine that was added: where it runs, and what has become of it."""

    id: str
    request: int
    node: str
    slot: int
    """Number of its place on the node, from 0."""
    state: Standing
    since: float
    reason: str = ""
    process: ProcessId | None = None
    """The process that waits for its step."""
    ending: Literal["", "GONE", "FAILED", "CANCELLED"] = ""
    """Told to end; what it is when it has."""
    end_by: float = 0.0
    """Time at which patience with that ends, as of `time.time`."""
    was_active: bool = False
    transport: Transport | None = None
    """The way in which weights get to it, if not as `weights.transport` says."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def number(self) -> int:
        return int(self.id.removeprefix("extra-"))

    def now(self, state: Standing, reason: str = "") -> "Extra":
        """The same in another state."""
        if state == self.state:
            return self
        active = self.was_active or state == "ACTIVE"
        return replace(
            self, state=state, since=time.time(), reason=reason or self.reason, was_active=active
        )


@dataclass(slots=True)
class ScaleState:
    """The memory of the scaler, should it be started again."""

    attempt: str
    """Attempt of the job whose steps these are: job id and restart count."""
    engines: int
    """Engines that the run shall have in all."""
    nodes: list[str]
    """Nodes that rollout holds besides those it started on."""
    per_node: int
    """Engines that fit on one."""
    requests: dict[int, Outcome] = field(default_factory=dict)
    extras: dict[str, Extra] = field(default_factory=dict)
    transport: Transport | None = None
    """Transport to engines that are added from here on, those that replace others included."""

    @property
    def live(self) -> list[Extra]:
        return [extra for extra in self.extras.values() if not extra.ended]

    @property
    def staying(self) -> list[Extra]:
        """Returns the engines that are not on their way out."""
        return [extra for extra in self.live if not extra.ending]

    @property
    def free(self) -> list[tuple[str, int]]:
        """(node, slot) where an engine can be put; nodes are filled one after the other."""
        taken = {(extra.node, extra.slot) for extra in self.live}
        places = [(node, slot) for node in self.nodes for slot in range(self.per_node)]
        return [place for place in places if place not in taken]

    def write(self, paths: RunPaths) -> None:
        write_json(paths.scale_state, asdict(self))

    @classmethod
    def read(cls, paths: RunPaths) -> Self | None:
        """None until the scaler has started."""
        record: dict[str, Any] | None = read_json(paths.scale_state)
        if record is None:
            return None
        extras = {}
        for name, fields in record.pop("extras").items():
            process = fields["process"] and ProcessId.read(fields["process"])
            extras[name] = Extra(**fields | {"process": process})
        requests = {int(n): Outcome(**fields) for n, fields in record.pop("requests").items()}
        return cls(**record, requests=requests, extras=extras)


def pending(paths: RunPaths, state: ScaleState) -> tuple[int, Request | None]:
    """(number of the newest request, the one that is under way)."""
    number, under_way = max(state.requests, default=0), None
    if number and not state.requests[number].final:
        under_way = Request.read(paths, number)
    while (found := Request.read(paths, number + 1)) is not None:
        number, under_way = number + 1, under_way or found
    return number, under_way
