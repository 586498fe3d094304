"""The roster: every engine's weights as the trainer knows them, in a record it alone writes."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from typing import Literal, Self

from relax_hpc.fleet import seen
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json

RosterState = Literal["SYNCING", "ACTIVE", "ASLEEP", "FENCED"]


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """The weights that one engine has."""

    start: str
    """Start of the member that this is about."""
    version: int | None
    """Policy version; None while it is undefined. That of an engine which takes long to load may
    be older than the roster's."""
    state: RosterState
    """SYNCING: its weights or its memory are being changed. ASLEEP: it has given its memory to the
    trainer on its GPUs. FENCED: the weights are undefined, and stay so until its owner has
    restarted it."""
    reason: str = ""
    """Reason why it is fenced."""


@dataclass(frozen=True, slots=True)
class Roster:
    """The state after, or during, updates of weights."""

    version: int
    """The newest policy version that engines were given."""
    members: dict[str, RosterEntry] = field(default_factory=dict)

    def serves(self, member: str, start: str) -> bool:
        """Whether that start of `member` holds the newest version, so it may be sent requests."""
        entry = self.members.get(member)
        return (
            entry is not None
            and (entry.start, entry.state) == (start, "ACTIVE")
            and entry.version == self.version
        )

    def write(self, paths: RunPaths) -> None:
        write_json(paths.roster, asdict(self))
        seen.folder_at(paths.control).note()

    @classmethod
    def read(cls, paths: RunPaths) -> Self | None:
        """None before the first update."""
        record = read_json(paths.roster)
        if record is None:
            return None
        members = {name: RosterEntry(**entry) for name, entry in record["members"].items()}
        return cls(record["version"], members)


@lru_cache(8)
def follow(paths: RunPaths) -> Callable[[], Roster | None]:
    """Does as `Roster.read`, for all of a process who look again and again."""
    return seen.follow(paths.roster, partial(Roster.read, paths))
