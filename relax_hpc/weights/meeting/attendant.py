"""Hears the trainer's invitations in a task that owns engines, and has these join."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Self

from relax_hpc.errors import EngineError
from relax_hpc.inference.client import EngineClient
from relax_hpc.runtime.comm.mpi_door import DoorEnd, door_type
from relax_hpc.runtime.files.records import follow, read_json, write_json
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.weights.meeting.http import join
from relax_hpc.weights.meeting.invitation import Invitation, JoinAnswer
from relax_hpc.weights.meeting.mpi import PURPOSE

log = logging.getLogger(__name__)

Hearing = Literal["mpi", "mpi_job", "files"]
"""How invitations come: mpi_job where one world of MPI holds trainer and tasks."""
_LOOK_S, _LINKED_LOOK_S = 0.25, 1.0


class Attendant:
    """A thread of the task. A context manager."""

    def __init__(
        self,
        paths: RunPaths,
        task: str,
        secret: RunSecret,
        way: Hearing,
        client: Callable[[str, str], EngineClient],
    ) -> None:
        """Starts to listen with the context.

        Args:
            task: name of this start of the task, `Member.task` of its engines.
            client: calls an engine by id and start; raises EngineError if that start is over.
        """
        self._task, self._client = task, client
        record = paths.rendezvous("weights-files" if way == "files" else "weights-mpi")
        self._paths, self._call = paths, follow(record, lambda: read_json(record))
        self._key = secret.derive(PURPOSE)
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="joins")
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._read_invitations if way == "files" else self._await_calls,
            name="attendant",
            daemon=True,
        )
        self._make = door_type(is_one_world=way == "mpi_job")
        self._door = None if way == "files" else self._open()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._threads.shutdown(wait=False)
        if self._door:
            self._door.close()

    def _await_calls(self) -> None:
        assert self._door
        answered = ""
        while not self._stopping.wait(_LINKED_LOOK_S if self._door.links else _LOOK_S):
            call = self._call()
            if call and self._task in call["awaits"] and call["round"] != answered:
                answered = call["round"]
                self._come(call["port"], call["library"])

    def _read_invitations(self) -> None:
        seen = ""
        while not self._stopping.wait(_LOOK_S):
            record = self._call()
            for each in record["invitations"] if record else ():
                if each["task"] == self._task and each["group"] != seen:
                    self._threads.submit(self._join, Invitation.of_json(each), self._write)
            seen = record["invitations"][0]["group"] if record else ""

    def _write(self, answer: JoinAnswer) -> None:
        write_json(self._paths.joined(answer.id), answer._asdict())

    def _open(self) -> DoorEnd:
        return self._make(self._task, self._key, self._hear)

    def _come(self, port: str, library: str) -> None:
        assert self._door is not None
        if self._door.has_died:
            self._door = self._open()
        begin = time.monotonic()
        if failed := self._door.call(port):
            own = self._door.library
            mixed = f"; the trainer has {library}, this task {own}: install one for both"
            why = failed + mixed * (own != library)
            log.warning("MPI: the trainer did not let this task in: %s", why)
        else:
            log.info("MPI: linked to the trainer after %.3f s", time.monotonic() - begin)

    def _hear(self, trainer: str, message: dict[str, Any]) -> None:
        def answer(joined: JoinAnswer) -> None:
            assert self._door
            self._door.send(trainer, joined._asdict())

        self._threads.submit(self._join, Invitation.of_json(message), answer)

    def _join(self, asked: Invitation, answer: Callable[[JoinAnswer], None]) -> None:
        error = ""
        try:
            join(self._client(asked.id, asked.start), asked)
        except EngineError as failed:
            error = str(failed)[:1000]
        answer(JoinAnswer(asked.id, asked.start, asked.group, error))
