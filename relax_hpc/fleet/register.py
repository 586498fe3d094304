"""The engines as rank 0 of the trainer knows them, and publishes them in the roster."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import RLock

from relax_hpc.fleet import members
from relax_hpc.fleet.control import EngineControl
from relax_hpc.fleet.members import Member
from relax_hpc.fleet.roster import Roster, RosterEntry, RosterState
from relax_hpc.paths import RunPaths

log = logging.getLogger(__name__)

HEALTH_S = 5.0
MEMORY = ("weights", "kv_cache")
"""Tags of what an engine releases."""
Key = tuple[str, str]
"""Id and start of a member."""


class Register:
    """Members of a run, by id and start: one that was restarted is another one.

    Threads in which members load (`weights.loads`) note how that ended.
    """

    def __init__(
        self,
        paths: RunPaths,
        ids: Callable[[], Sequence[str]],
        connect: Callable[[Member], EngineControl],
    ) -> None:
        """Takes nothing over from the trainer before, see `take_over`.

        Args:
            paths: where members announce themselves.
            ids: members of this run; asked every time, since engines come and go.
            connect: makes the client of a member.
        """
        self.paths, self._ids, self._connect = paths, ids, connect
        self._members = members.follow(paths)
        self.version = -1
        """The newest that engines were given, or are being given."""
        self._entries: dict[Key, RosterEntry] = {}
        self._clients: dict[Key, EngineControl] = {}
        self._released: dict[Key, list[str]] = {}
        self._lock = RLock()
        last = Roster.read(paths)
        held = last.members.items() if last else ()
        self._torn = {(name, h.start) for name, h in held if h.state == "SYNCING"}

    def take_over(self) -> None:
        """Takes over from the last roster who sleeps.

        Of an engine that was being changed nobody knows which memory it has: it is fenced.
        """
        last = Roster.read(self.paths)
        if last is None:
            return
        self.version = last.version
        for name, entry in last.members.items():
            key = name, entry.start
            if entry.state == "ASLEEP":
                self._entries[key], self._released[key] = entry, list(MEMORY)
            elif entry.state == "SYNCING":
                reason = "the trainer died while it was updated, fell asleep or woke"
                self._entries[key] = RosterEntry(entry.start, None, "FENCED", reason)

    def known(self) -> list[Member]:
        """Returns the members that are healthy, as their owners say."""
        return [member for member in self.announced() if member.state == "HEALTHY"]

    def announced(self) -> list[Member]:
        """Returns the members that there are records of, in whatever state."""
        return [member for member in self._members.get(*self._ids()) if member is not None]

    def live(
        self, threads: ThreadPoolExecutor, *, without: Callable[[Member], bool] = lambda _: False
    ) -> dict[Member, EngineControl]:
        """Returns the members that answer; skips the fenced ones and those that `without` picks."""
        candidates = {
            member: self.client(member)
            for member in self.known()
            if self.state(member) != "FENCED" and not without(member)
        }
        answers = list(threads.map(lambda r: r.health(HEALTH_S), candidates.values()))
        return {m: r for (m, r), ok in zip(candidates.items(), answers, strict=True) if ok}

    def client(self, member: Member) -> EngineControl:
        if key_of(member) not in self._clients:
            self._clients[key_of(member)] = self._connect(member)
        return self._clients[key_of(member)]

    def state(self, member: Member) -> RosterState | None:
        """None if it was never given anything."""
        entry = self._entries.get(key_of(member))
        return entry.state if entry else None

    def is_torn(self, member: Member) -> bool:
        """Whether the trainer before died while it updated it: what it holds is undefined."""
        return key_of(member) in self._torn

    def holds(self) -> list[int | None]:
        """Returns the versions of the active members."""
        with self._lock:
            return [h.version for h in self._entries.values() if h.state == "ACTIVE"]

    def is_current(self, member: Member) -> bool:
        """Whether nothing is to be done about it until the next version."""
        entry = self._entries.get(key_of(member))
        if entry is None:
            return False
        return entry.state == "FENCED" or entry.version == self.version

    def note(
        self, member: Member, state: RosterState, reason: str = "", *, version: int | None = None
    ) -> None:
        """`version` is that of an ACTIVE one, if it is not the newest."""
        held = self.version if version is None else version
        with self._lock:
            self._entries[key_of(member)] = RosterEntry(
                member.start, held if state == "ACTIVE" else None, state, reason
            )
        if state == "ASLEEP":
            self._released[key_of(member)] = list(MEMORY)

    def fence(self, member: Member, reason: str) -> None:
        """Leaves it out until its owner has started it again."""
        log.error("engine %s is fenced at v%d: %s", member.id, self.version, reason)
        self.note(member, "FENCED", reason)

    def lacks(self, member: Member, tag: str) -> bool:
        """Whether it has released that memory, and not taken it back."""
        return tag in self._released.get(key_of(member), ())

    def note_back(self, member: Member, tag: str) -> None:
        self._released[key_of(member)].remove(tag)

    def write(self) -> None:
        """Publishes the roster."""
        known = set(self._ids())
        with self._lock:
            newest = {name: h for (name, _), h in self._entries.items() if name in known}
            Roster(self.version, newest).write(self.paths)


def key_of(member: Member) -> Key:
    return member.id, member.start
