"""Loads of snapshots that nobody waits for: an engine on a slow network keeps nobody else."""

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple

from relax_hpc.comm.orders import Receipt
from relax_hpc.errors import EngineError
from relax_hpc.fleet import switches
from relax_hpc.fleet.members import Member
from relax_hpc.fleet.register import Key, Register, key_of
from relax_hpc.telemetry.timers import Phase
from relax_hpc.weights.verify import Verified

_POLL_S = 0.05


class Loaded(NamedTuple):
    """A load that has ended."""

    member: Member
    version: int
    """The version that was loaded, which need not be the newest any more."""
    seconds: dict[str, float]
    """Time of each part."""
    receipts: list[Receipt]
    """Receipts of the member's ranks, if they were asked and can tell."""
    verified: Verified | None
    reason: str = ""
    """Reason why the member is fenced; empty if it holds the version."""
    phases: Sequence[Phase] = ()
    """The load, with the time at which it began."""


class _UnderWay(NamedTuple):
    member: Member
    version: int
    deadline: float


class Loads:
    """Loads, each by a thread that says in the roster at once how it ended: engines that have
    loaded are of use while the trainer trains. Lives in rank 0 of the trainer."""

    def __init__(self, register: Register, timeout_s: float) -> None:
        """Changes what is said there of members that load, and of nobody else."""
        self._register, self._timeout_s = register, timeout_s
        self._notes = switches.Notes(register.paths)
        self._under_way = dict[Key, _UnderWay]()
        self._lock = Lock()
        self._ended: SimpleQueue[Loaded] = SimpleQueue()
        self._failure: Exception | None = None
        """The end of a thread that could not say how its load ended."""

    def begin(self, member: Member, version: int, load: Callable[[], Loaded]) -> None:
        """Has a member that is SYNCING load `version`; what fails in `load` fences it."""
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            self._under_way[key_of(member)] = _UnderWay(member, version, deadline)
        # A trainer that fails does not stay for the sake of a load.
        Thread(target=self._run, args=(member, version, load), daemon=True).start()

    def has(self, member: Member) -> bool:
        """Whether it loads at present."""
        with self._lock:  # not between the end of a load and what the register says of it
            return key_of(member) in self._under_way

    def expire(self) -> None:
        """Fences members that have loaded for too long.

        Raises:
            Exception: what kept a thread from saying how a load ended; `ended` does so, too.
        """
        self._check()
        with self._lock:
            now = time.monotonic()
            for late in [each for each in self._under_way.values() if now > each.deadline]:
                reason = f"has not loaded v{late.version} within {self._timeout_s:.0f} s"
                self._end(Loaded(late.member, late.version, {}, [], None, reason))

    def wait(self) -> bool:
        """Returns when nobody loads, after `timeout_s` at most; whether there was anybody."""
        waited = False
        while self._under_way:
            waited = True
            self.expire()
            time.sleep(_POLL_S)
        return waited

    def ended(self) -> list[Loaded]:
        """Returns the loads that ended since it was last asked."""
        self._check()
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self, member: Member, version: int, load: Callable[[], Loaded]) -> None:
        try:
            loaded = self._loaded(member, version, load)
            with self._lock:
                if key_of(member) in self._under_way:  # else it came too late
                    self._end(loaded)
        except Exception as error:  # noqa: BLE001 -- the trainer would hear nothing of it
            self._failure = error

    def _loaded(self, member: Member, version: int, load: Callable[[], Loaded]) -> Loaded:
        try:
            loaded = load()
            if member.takes_orders:
                self._notes.note(member, version, loaded.receipts)
        except (EngineError, OSError) as error:
            return Loaded(member, version, {}, [], None, str(error))
        return loaded

    def _end(self, loaded: Loaded) -> None:
        register, member = self._register, loaded.member
        if loaded.reason:
            register.fence(member, loaded.reason)
        else:
            register.note(member, "ACTIVE", version=loaded.version)
        register.write()
        self._ended.put(loaded)
        del self._under_way[key_of(member)]
