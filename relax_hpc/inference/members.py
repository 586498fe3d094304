"""The registry of engines: records by which trainer and engines know each other.

* An engine's member record has one writer, its owner.
* The roster has the weights of every engine; rank 0 of the trainer writes it, through the
  `EngineRegistry`. The standing of an engine joins both records.
* The lease says who may use GPUs that the trainer shares with its engines; rank 0 writes it. An
  engine writes STARTING before it reads the lease, and takes no memory unless engines hold it. Rank
  0 gives the lease to the trainer before it checks which engines are STARTING. So neither can
  overlook the other.
"""

import logging
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from threading import RLock
from typing import TYPE_CHECKING, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from relax_hpc.config.rollout import TransportName
from relax_hpc.errors import PeerTimeoutError
from relax_hpc.runtime.comm import address
from relax_hpc.runtime.files import records
from relax_hpc.runtime.files.records import RecordCache, read_json, write_json
from relax_hpc.runtime.paths import RunPaths

if TYPE_CHECKING:
    from relax_hpc.inference.client import EngineClient

log = logging.getLogger(__name__)

State = Literal["WAITING", "STARTING", "HEALTHY", "DRAINING", "GONE", "FAILED"]

_REFRESH_S = 60.0
"""Long, since there are many records."""
_START = re.compile(r"(.+)\.(\d+)-(\d+)-\d+")
"""Job, its restarts, starts of the task's step within that, starts of the engine."""


class Member(NamedTuple):
    """One engine, as its owner announces it."""

    id: str
    start: str
    """Unique to every start of the engine: job attempt, start of the task's step, start of the
    engine within it."""
    url: str
    """Empty until the engine answers. Its token follows from id and start, see `run_secret`."""
    num_ranks: int
    """Ranks the engine brings into the weight group."""
    engine: str
    state: State
    """WAITING: the trainer has its GPUs for now. STARTING: not usable yet. HEALTHY: may be updated,
    and gets requests once it holds the newest version. DRAINING: finishes its requests and gets no
    new ones. GONE: its owner stopped it. FAILED: it does not come back by itself."""
    reason: str = ""
    """Current work of a STARTING engine; cause if it is FAILED."""
    lane: int = -1
    """Rank of the trainer that shares the GPU of the engine's first rank, the others following; -1:
    the engine has GPUs of its own."""
    transport: TransportName = "collective"
    """Transport of weights to it, if its pool follows the policy."""
    pool: str = "rollout"
    """Name of the pool in the job: its table is `[engines.NAME]`."""
    task: str = ""
    """Start of the task that owns it and hears invitations to weight groups; "" if none does."""
    version: int = -1
    """Policy version that its owner has loaded; -1: none, or the trainer decides."""

    @property
    def key(self) -> "Key":
        """Returns the key of this start: a restarted engine is another member."""
        return self.id, self.start

    @property
    def attempt(self) -> str:
        return self.start.rsplit("-", 2)[0]

    @property
    def takes_orders(self) -> bool:
        """Whether it takes a version in one call (`comm.orders`) rather than a call per bucket."""
        return self.engine == "sglang"


Key = tuple[str, str]
Engines = dict[Member, "EngineClient"]


def announce(paths: RunPaths, member: Member) -> None:
    """Records a member, unless a later task of the same job has done so.

    Its owner may be obsolete: Slurm may have restarted the job, or its step, meanwhile.
    """
    there = find(paths, member.id)
    if there is not None and _is_later(there.start, member.start):
        log.warning("%s: start %s is on record, %s is over", member.id, there.start, member.start)
        return
    write_json(paths.member(member.id), member._asdict())
    records.folder_at(paths.members).note()


def _is_later(start: str, other: str) -> bool:
    """Whether `start` belongs to a task that the same job started after that of `other`.

    Job ids alone do not tell which is later.
    """
    found, before = _START.fullmatch(start), _START.fullmatch(other)
    if found is None or before is None or found[1] != before[1]:
        return False
    return (int(found[2]), int(found[3])) > (int(before[2]), int(before[3]))


def follow(paths: RunPaths) -> RecordCache[Member | None]:
    """Polls members by id, in any state; None if never announced."""
    return RecordCache(paths.members, partial(find, paths), refresh_s=_REFRESH_S)


def find(paths: RunPaths, member: str) -> Member | None:
    """Returns the record of one member in any state; None if never announced."""
    record = read_json(paths.member(member))
    if record is None:
        return None
    # A run that was resumed may be older than what is a field today.
    return Member(**{key: record[key] for key in Member._fields if key in record})


def announce_extras(paths: RunPaths, ids: Sequence[str]) -> None:
    """Records the ids of engines added, or about to be, after the job started."""
    write_json(paths.extras, {"ids": list(ids)})


def extras(paths: RunPaths) -> list[str]:
    """Returns the ids last announced. In one file, since listings of a folder can be stale for
    long."""
    record = read_json(paths.extras)
    return [] if record is None else list(record["ids"])


def follow_extras(paths: RunPaths) -> Callable[[], list[str]]:
    """Does as `extras`, for pollers."""
    return records.follow(paths.extras, partial(extras, paths))


RosterState = Literal["SYNCING", "ACTIVE", "ASLEEP", "FENCED"]


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """The weights of one engine."""

    start: str
    version: int | None
    """Policy version; None while it is undefined. May be older than the roster's if an engine takes
    long to load."""
    state: RosterState
    """SYNCING: its weights or memory are changing. ASLEEP: it released its memory to the trainer on
    its GPUs. FENCED: the weights are undefined until its owner has restarted it."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Roster:
    """The state after, or during, updates of weights."""

    version: int
    members: dict[str, RosterEntry] = field(default_factory=dict)

    def entry(self, member: str, start: str) -> RosterEntry | None:
        """Returns the entry of that start of `member`."""
        entry = self.members.get(member)
        return entry if entry is not None and entry.start == start else None

    def serves(self, member: str, start: str) -> bool:
        """Whether that start of `member` holds the newest version, and so may get requests."""
        entry = self.entry(member, start)
        return entry is not None and entry.state == "ACTIVE" and entry.version == self.version

    def write(self, paths: RunPaths) -> None:
        write_json(paths.roster, asdict(self))
        records.folder_at(paths.control).note()

    @classmethod
    def read(cls, paths: RunPaths) -> Self | None:
        record = read_json(paths.roster)
        if record is None:
            return None
        members = {name: RosterEntry(**entry) for name, entry in record["members"].items()}
        return cls(record["version"], members)


@lru_cache(8)
def follow_roster(paths: RunPaths) -> Callable[[], Roster | None]:
    """Does as `Roster.read`, with one poller for the whole process."""
    return records.follow(paths.roster, partial(Roster.read, paths))


Standing = Literal[
    "PENDING", "WAITING", "STARTING", "HEALTHY", "SYNCING", "ACTIVE", "ASLEEP", "FENCED",
    "DRAINING", "GONE", "FAILED", "CANCELLED",
]  # fmt: skip
"""Only the scaler knows PENDING and CANCELLED engines: they have no process yet."""

ENDED = ("GONE", "FAILED", "CANCELLED")


def standing(member: Member | None, roster: Roster | None) -> Standing:
    """Returns the state of an engine whose step was started.

    Only ACTIVE engines get requests, except before the first update (`roster` is None): then
    rollout tasks use their own engines as they are, at version 0.
    """
    if member is None:
        return "STARTING"
    if member.state != "HEALTHY" or roster is None:
        return member.state
    if roster.serves(member.id, member.start):
        return "ACTIVE"
    entry = roster.entry(member.id, member.start)
    if entry is None or entry.state == "ACTIVE":
        return "HEALTHY"
    return entry.state


def reason_of(member: Member | None, roster: Roster | None) -> str:
    """Returns why an engine is in its state, as its owner or the trainer that fenced it says."""
    if member is None or member.reason or roster is None:
        return member.reason if member else ""
    entry = roster.entry(member.id, member.start)
    return entry.reason if entry else ""


def give(paths: RunPaths, attempt: str, holder: Literal["trainer", "engines"]) -> None:
    """Gives the lease; one of an earlier attempt of the job is void."""
    write_json(paths.lease, {"attempt": attempt, "holder": holder})


def is_with_engines(paths: RunPaths, attempt: str) -> bool:
    """Whether engines of this attempt may take memory."""
    return bool(read_json(paths.lease) == {"attempt": attempt, "holder": "engines"})


HEALTH_S = 5.0
_SILENT_S, _GIVE_UP_S = 20.0, 120.0
MEMORY = ("weights", "kv_cache")
"""Tags of memory that an engine releases."""


class EngineRegistry:
    """Tracks the members of a run in rank 0 of the trainer, and publishes them in the roster.

    Threads in which members load (`weights.files.Loads`) note the outcome here.
    """

    def __init__(
        self,
        paths: RunPaths,
        ids: Callable[[], Sequence[str]],
        connect: Callable[[Member], "EngineClient"],
    ) -> None:
        """Keeps fenced members fenced, and fences members that the previous trainer was changing
        when it died: the state of their weights and memory is unknown.

        Args:
            ids: members of this run; called every time, since engines come and go.
        """
        self.paths, self._ids, self._connect = paths, ids, connect
        self._members = follow(paths)
        self.version = -1
        """The newest version given to engines, or being given."""
        self._entries: dict[Key, RosterEntry] = {}
        self._clients: dict[Key, EngineClient] = {}
        self._released: dict[Key, list[str]] = {}
        self._silent_since: dict[Key, float] = {}
        """Member that is healthy and does not answer -> begin of its silence."""
        self._told = set[Key]()
        self._has_met = False
        """Whether any member ever answered."""
        self._lock = RLock()
        last = Roster.read(paths)
        for name, entry in last.members.items() if last else ():
            if entry.state in ("SYNCING", "FENCED"):
                why = entry.reason or "the trainer died while it was updated, fell asleep or woke"
                self._entries[name, entry.start] = RosterEntry(entry.start, None, "FENCED", why)
        self._has_told = not self._entries

    def take_over(self) -> None:
        """Takes over sleeping members from the last roster."""
        last = Roster.read(self.paths)
        if last is None:
            return
        self.version = last.version
        for name, entry in last.members.items():
            key = name, entry.start
            if entry.state == "ASLEEP":
                self._entries[key], self._released[key] = entry, list(MEMORY)

    def tell_torn(self, check_fenced: Callable[[], None]) -> None:
        """Publishes, once, the members fenced from the beginning, and nothing else: their owners
        restart them, and their requests go on elsewhere.
        """
        if self._has_told:
            return
        check_fenced()
        if last := Roster.read(self.paths):
            fenced = {
                name: self._entries[name, entry.start]
                for name, entry in last.members.items()
                if entry.state == "SYNCING" and (name, entry.start) in self._entries
            }
            for name, entry in fenced.items():
                log.error("engine %s is fenced: %s", name, entry.reason)
            Roster(last.version, last.members | fenced).write(self.paths)
        self._has_told = True

    def list_healthy(self) -> list[Member]:
        """Returns the members that are healthy according to their owners."""
        return [member for member in self.list_announced() if member.state == "HEALTHY"]

    def list_announced(self) -> list[Member]:
        return [member for member in self._members.get(*self._ids()) if member is not None]

    def live(
        self, threads: ThreadPoolExecutor, *, without: Callable[[Member], bool] = lambda _: False
    ) -> Engines:
        """Returns the members that answer; skips fenced ones and those for which `without` is
        true.

        Raises:
            PeerTimeoutError: there are some, and for long none was ever reached from here.
        """
        candidates = {
            member: self.client(member)
            for member in self.list_healthy()
            if self.state(member) != "FENCED" and not without(member)
        }
        answers = list(threads.map(lambda r: r.health(HEALTH_S), candidates.values()))
        found = {m: r for (m, r), ok in zip(candidates.items(), answers, strict=True) if ok}
        self._has_met = self._has_met or bool(found)
        self._judge_silence([member for member in candidates if member not in found])
        return found

    def _judge_silence(self, silent: Sequence[Member]) -> None:
        """Says once of a member that no way leads to it. Its owner, which is beside it, finds it
        healthy: so it is the network, or this node."""
        now = time.monotonic()
        self._silent_since = {m.key: self._silent_since.get(m.key, now) for m in silent}
        for member in silent:
            silent_s = now - self._silent_since[member.key]
            is_given_up = silent_s > _GIVE_UP_S and not self._has_met
            if silent_s < _SILENT_S or (member.key in self._told and not is_given_up):
                continue
            try:
                at = urlsplit(member.url)
                address.reach(
                    str(at.hostname), at.port or 80, "the trainer", f"engine {member.id}",
                    timeout_s=1,
                )  # fmt: skip
            except PeerTimeoutError as error:
                if is_given_up:
                    raise
                self._told.add(member.key)
                log.error("%s", error)

    def client(self, member: Member) -> "EngineClient":
        if member.key not in self._clients:
            self._clients[member.key] = self._connect(member)
        return self._clients[member.key]

    def state(self, member: Member) -> RosterState | None:
        """Returns None if it was never given anything."""
        entry = self._entries.get(member.key)
        return entry.state if entry else None

    def holds(self) -> list[int | None]:
        with self._lock:
            return [h.version for h in self._entries.values() if h.state == "ACTIVE"]

    def is_current(self, member: Member) -> bool:
        """Whether it needs nothing until the next version."""
        entry = self._entries.get(member.key)
        if entry is None:
            return False
        return entry.state == "FENCED" or entry.version == self.version

    def note(
        self, member: Member, state: RosterState, reason: str = "", *, version: int | None = None
    ) -> None:
        """`version` is that of an ACTIVE member, if it is not the newest."""
        held = self.version if version is None else version
        with self._lock:
            self._entries[member.key] = RosterEntry(
                member.start, held if state == "ACTIVE" else None, state, reason
            )
        if state == "ASLEEP":
            self._released[member.key] = list(MEMORY)

    def fence(self, member: Member, reason: str) -> None:
        """Leaves it out until its owner has restarted it."""
        log.error("engine %s is fenced at v%d: %s", member.id, self.version, reason)
        self.note(member, "FENCED", reason)

    def lacks(self, member: Member, tag: str) -> bool:
        """Whether it has released that memory, and not taken it back."""
        return tag in self._released.get(member.key, ())

    def note_back(self, member: Member, tag: str) -> None:
        self._released[member.key].remove(tag)

    def write(self) -> None:
        known = set(self._ids())
        with self._lock:
            newest = {name: h for (name, _), h in self._entries.items() if name in known}
            Roster(self.version, newest).write(self.paths)
