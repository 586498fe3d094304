"""Reads and writes control/scale: requests of `relax-hpc scale`, and the scaler's state."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from relax_hpc.config.rollout import TransportName
from relax_hpc.inference.members import ENDED, Standing
from relax_hpc.runtime.files.records import RecordCache, read_json, write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.process import ProcessId

Kind = Literal["out", "in"]
RUN_ENDED = "the run ended"
"""Reason for the end of an engine that nobody removed."""


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """A request to scale. The target is absolute, so repeating a request changes nothing."""

    id: int
    kind: Kind
    engines: int
    """Target number of engines in the run, including those it started with."""
    member: str | None
    """The engine to remove; None leaves the choice to the scaler."""
    drain_s: float
    """Time for running requests of a removed engine to finish."""
    time: float
    transport: TransportName | None = None
    """Transport of weights to added engines; None: as in `weights.transport`."""

    @classmethod
    def read(cls, paths: RunPaths, number: int) -> Self | None:
        record = read_json(paths.scale_request(number))
        return None if record is None else cls(**record)

    @staticmethod
    def follow(paths: RunPaths) -> "Callable[[int], ScaleRequest | None]":
        """Does as `read`, for pollers of the next request."""
        seen = RecordCache(paths.scale, lambda number: ScaleRequest.read(paths, int(number)))
        return lambda number: seen.get(str(number))[0]

    def asks_the_same(self, other: "ScaleRequest") -> bool:
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
class ScaleOutcome:
    """The state of a request, with the facts for a rollback."""

    state: Literal["PENDING", "DONE", "FAILED", "CANCELLED"]
    before: int
    """The target before, which a rollback restores."""
    reason: str = ""

    @property
    def final(self) -> bool:
        return self.state != "PENDING"


@dataclass(frozen=True, slots=True)
class Extra:
    """An engine that was added: its place and state."""

    id: str
    request: int
    node: str
    slot: int
    """Slot on the node, from 0."""
    state: Standing
    since: float
    reason: str = ""
    process: ProcessId | None = None
    """The process that waits for its Slurm step."""
    ending: Literal["", "GONE", "FAILED", "CANCELLED"] = ""
    """Set once told to end: its state after that."""
    end_by: float = 0.0
    was_active: bool = False
    transport: TransportName | None = None
    """Transport of weights to it, if not as in `weights.transport`."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def number(self) -> int:
        return int(self.id.removeprefix("extra-"))

    def now(self, state: Standing, reason: str = "") -> "Extra":
        if state == self.state:
            return self
        active = self.was_active or state == "ACTIVE"
        return replace(
            self, state=state, since=time.time(), reason=reason or self.reason, was_active=active
        )


@dataclass(slots=True)
class ScaleState:
    """The scaler's state, for a restart of it."""

    attempt: str
    """Attempt of the job that owns these steps: job id and restart count."""
    engines: int
    """Target number of engines in the run."""
    nodes: list[str]
    """Nodes of rollout besides those it started on."""
    per_node: int
    """Engines that fit on one node."""
    requests: dict[int, ScaleOutcome] = field(default_factory=dict)
    extras: dict[str, Extra] = field(default_factory=dict)
    transport: TransportName | None = None
    """Transport to engines added from now on, including replacements."""

    @property
    def live(self) -> list[Extra]:
        return [extra for extra in self.extras.values() if not extra.ended]

    @property
    def staying(self) -> list[Extra]:
        return [extra for extra in self.live if not extra.ending]

    @property
    def free(self) -> list[tuple[str, int]]:
        """Returns each free (node, slot); nodes are filled one after the other."""
        taken = {(extra.node, extra.slot) for extra in self.live}
        places = [(node, slot) for node in self.nodes for slot in range(self.per_node)]
        return [place for place in places if place not in taken]

    def write(self, paths: RunPaths) -> None:
        write_json(paths.scale_state, asdict(self))

    @classmethod
    def read(cls, paths: RunPaths) -> Self | None:
        record: dict[str, Any] | None = read_json(paths.scale_state)
        if record is None:
            return None
        extras = {}
        for name, fields in record.pop("extras").items():
            process = fields["process"] and ProcessId.read(fields["process"])
            extras[name] = Extra(**fields | {"process": process})
        requests = {int(n): ScaleOutcome(**fields) for n, fields in record.pop("requests").items()}
        return cls(**record, requests=requests, extras=extras)


def pending(paths: RunPaths, state: ScaleState) -> tuple[int, ScaleRequest | None]:
    """Returns (number of the newest request, the request in progress)."""
    number, under_way = max(state.requests, default=0), None
    if number and not state.requests[number].final:
        under_way = ScaleRequest.read(paths, number)
    while (found := ScaleRequest.read(paths, number + 1)) is not None:
        number, under_way = number + 1, under_way or found
    return number, under_way
