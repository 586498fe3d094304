"""Invites engines over MPI: rank 0 of the trainer has a door, to which the engines' tasks come."""

import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future

from relax_hpc.errors import EngineError
from relax_hpc.inference.members import Engines, Member
from relax_hpc.runtime.comm.mpi_door import DoorProcess
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.weights.meeting.invitation import Invitation, Joined, Joins, Way

PURPOSE = "meeting"
"""Of the key."""
_LINK_S = 5.0
"""Longest wait for tasks that have announced that they come."""


class MpiCarrier:
    way: Way = "mpi"

    def __init__(self, paths: RunPaths, secret: RunSecret) -> None:
        self._paths, self._key = paths, secret.derive(PURPOSE)
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, str, str], Future[None]] = {}
        self._open()

    def reaches(self, engines: Engines, timeout_s: float) -> list[Member]:
        tasks = {member.task for member in engines if member.task}
        if not tasks:
            return []
        if self._door.problem and self._door.library:  # it was there, and has died
            self._open()
        port = self._door.accept(tasks)
        if tasks - self._door.links:
            record = {"port": port, "serial": self._serial, "awaits": sorted(tasks)}
            write_json(self._paths.rendezvous("weights-mpi"), record)
            self._door.wait_for(tasks, min(timeout_s, _LINK_S))
        links = self._door.links
        return [member for member in engines if member.task in links]

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
        self._door = DoorProcess("trainer", self._key, self._hear)
        self._serial = secrets.token_hex(8)

    def _hear(self, _: str, message: dict[str, str]) -> None:
        answer = Joined(**message)
        with self._lock:
            join = self._pending.pop((answer.id, answer.start, answer.group), None)
        if join is None:
            return  # of a group that was given up
        if answer.error:
            join.set_exception(EngineError(answer.error))
        else:
            join.set_result(None)
