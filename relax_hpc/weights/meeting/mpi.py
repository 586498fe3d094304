"""Invites engines over MPI: rank 0 of the trainer has a door, to which the engines' tasks come."""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from relax_hpc.errors import EngineError
from relax_hpc.inference.members import Engines, Member
from relax_hpc.runtime.comm.mpi_door import DoorEnd, DoorProcess
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.weights.meeting.invitation import CarrierName, Invitation, JoinAnswer, Joins

PURPOSE = "meeting"
"""Purpose of the key."""
_LINK_S = 3.0
"""Longest wait for a few tasks that have announced that they come."""
_LINKS_S = 20.0
"""Likewise for all."""


class MpiCarrier:
    way: CarrierName = "mpi"

    def __init__(
        self, paths: RunPaths, secret: RunSecret, door: Callable[..., DoorEnd] = DoorProcess
    ) -> None:
        """Args:
        door: `DoorThread`, where one world of MPI holds all tasks.
        """
        self._paths, self._key, self._make = paths, secret.derive(PURPOSE), door
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, str, str], Future[None]] = {}
        self._open()

    def reaches(self, engines: Engines, timeout_s: float) -> list[Member]:
        tasks = {member.task for member in engines if member.task}
        if not tasks:
            return []
        if self._door.has_died:
            self._open()
        deadline = time.monotonic() + min(timeout_s, _LINKS_S)
        coming = sorted(tasks - self._door.links)
        while coming and time.monotonic() < deadline and not self._door.problem:
            wave, coming = coming[: self._most], coming[self._most :]
            port = self._door.accept(self._door.links & tasks | set(wave))
            record = {
                "port": port, "library": self._door.library, "round": secrets.token_hex(8),
                "awaits": wave,
            }  # fmt: skip
            write_json(self._paths.rendezvous("weights-mpi"), record)
            self._door.wait_for(wave, _LINK_S)
        links = self._door.links
        return [member for member in engines if member.task in links]

    @property
    def _most(self) -> int:
        """Returns how many tasks are let in at once: a port of MPICH 5.0 dies of two that connect
        at the same time."""
        return 1 if self._door.library.startswith("MPICH Version: 5.0") else 8

    def invite(self, engines: Engines, invitations: Mapping[Member, Invitation]) -> Joins:
        joins: Joins = {member: Future() for member in invitations}
        with self._lock:
            self._pending = {
                (asked.id, asked.start, asked.group): joins[member]
                for member, asked in invitations.items()
            }
        for member, asked in invitations.items():
            self._door.send(member.task, asked.to_json())
        return joins

    def close(self) -> None:
        self._door.close()

    @property
    def problem(self) -> str:
        return self._door.problem

    def _open(self) -> None:
        self._door = self._make("trainer", self._key, self._hear)

    def _hear(self, _: str, message: dict[str, str]) -> None:
        answer = JoinAnswer(**message)
        with self._lock:
            join = self._pending.pop((answer.id, answer.start, answer.group), None)
        if join is None:
            return  # of a group that was given up
        if answer.error:
            join.set_exception(EngineError(answer.error))
        else:
            join.set_result(None)
