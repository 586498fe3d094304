"""Ranks that meet at rank 0 over TCP, for launchers without MPI.

All of them know a key (`run_secret`). What a rank says is unpickled only after its MAC was checked.
"""

import pickle
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self

from relax_hpc import heartbeat
from relax_hpc.comm import channel
from relax_hpc.comm.channel import Channel, StrangerError
from relax_hpc.comm.hub import Hub
from relax_hpc.errors import PeerTimeoutError
from relax_hpc.records import read_json, write_json
from relax_hpc.run_secret import derive

_POLL_S = 0.05
_CALL_S = 30.0
"""Limit of one try to join; rank 0 may be busy with something that lets no other thread run."""
_FAREWELL_S = 1.0
_VALUE, _FAILURE = b"v", b"x"


class StarWorld:
    """One of the ranks; rank 0 hears all, and tells all.

    Raises:
        PeerTimeoutError: by every method, when a rank is gone or silent for too long; it is named.
            The world is of no use then.
    """

    def __init__(
        self, rank: int, size: int, key: bytes, end: Hub | Channel | None, *, timeout_s: float
    ) -> None:
        """Takes as `end` the hub of rank 0, others' channel to it, or None if there is one rank."""
        self.rank, self.size = rank, size
        self._key, self.timeout_s, self._splits = key, timeout_s, 0
        self._hub = end if isinstance(end, Hub) else None
        self._channels = {0: end} if isinstance(end, Channel) else dict[int, Channel]()

    @classmethod
    def join(cls, rank: int, size: int, rendezvous: Path, key: bytes, *, timeout_s: float) -> Self:
        """Finds rank 0 by a record on the shared file system, which rank 0 writes.

        Args:
            rendezvous: that record; its name must be new for every start.
            key: equal on all ranks, and theirs alone.
            timeout_s: how long a rank may be silent.
        """
        if rank == 0:
            hub = Hub(size, key)
            host, port = hub.address
            write_json(rendezvous, {"host": host, "port": port})
            return cls(rank, size, key, hub, timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        record = _wait_for_record(rendezvous, deadline, timeout_s)
        end = _call(record["host"], record["port"], rank, key, deadline)
        return cls(rank, size, key, end, timeout_s=timeout_s)

    @heartbeat.phase("ranks", waits=True)
    def bcast(self, value: Any) -> Any:  # noqa: ANN401
        if self.rank:
            return self._hear_rank_0()
        self._tell(value)
        return value

    @heartbeat.phase("ranks", waits=True)
    def allgather(self, value: Any) -> list[Any]:  # noqa: ANN401
        if self.rank:
            self._send(0, _VALUE + pickle.dumps(value))
            heard: list[Any] = self._hear_rank_0()
            return heard
        values = [value, *self._hear()]
        self._tell(values)
        return values

    def barrier(self) -> None:
        self.allgather(None)

    @heartbeat.phase("ranks", waits=True)
    def split(self, color: int) -> "StarWorld":
        members = [rank for rank, other in enumerate(self.allgather(color)) if other == color]
        rank, size = members.index(self.rank), len(members)
        self._splits += 1
        key = derive(self._key, f"split/{self._splits}/{color}")
        hub = Hub(size, key) if rank == 0 and size > 1 else None
        addresses = self.allgather(hub.address if hub else None)
        end: Hub | Channel | None = hub
        if rank:
            host, port = addresses[members[0]]
            end = _call(host, port, rank, key, time.monotonic() + self.timeout_s)
        return StarWorld(rank, size, key, end, timeout_s=self.timeout_s)

    def _tell(self, value: Any) -> None:  # noqa: ANN401
        """Sends a value from rank 0 to all others."""
        self._wait_for_all()
        message = _VALUE + pickle.dumps(value) if self._channels else b""
        for rank in self._channels:
            self._send(rank, message)

    def _hear(self) -> list[Any]:
        """Returns what the others send to rank 0, a value each, in the order of ranks."""
        self._wait_for_all()
        deadline, values = time.monotonic() + self.timeout_s, []
        for rank, peer in self._channels.items():
            try:
                message = peer.receive(timeout_s=max(deadline - time.monotonic(), _POLL_S))
            except TimeoutError:
                later = [each for each in self._channels if each > rank]
                silent = [each for each in later if not self._channels[each].has_spoken()]
                self._fail([rank, *silent], f"said nothing for {self.timeout_s:g} s")
            except OSError as error:
                self._fail([rank], f"left: {error}", error)
            values.append(pickle.loads(memoryview(message)[1:]))  # the MAC says: our own rank's
        return values

    def _hear_rank_0(self) -> Any:  # noqa: ANN401
        try:
            message = self._channels[0].receive(timeout_s=self.timeout_s)
        except TimeoutError:
            self._fail([0], f"said nothing for {self.timeout_s:g} s")
        except OSError as error:
            self._fail([0], f"left: {error}", error)
        if message[:1] == _FAILURE:
            raise PeerTimeoutError(message[1:].decode())
        return pickle.loads(memoryview(message)[1:])  # the MAC says: our own rank's

    def _send(self, rank: int, message: bytes) -> None:
        try:
            self._channels[rank].send(message, timeout_s=self.timeout_s)
        except TimeoutError:
            self._fail([rank], f"listened to nothing for {self.timeout_s:g} s")
        except OSError as error:
            if self.rank:
                self._hear_last_words()
            self._fail([rank], f"left: {error}", error)

    def _hear_last_words(self) -> None:
        """Rank 0 may have said why it left before it heard this rank."""
        try:
            message = self._channels[0].receive(timeout_s=_FAREWELL_S)
        except OSError:
            return
        if message[:1] == _FAILURE:
            raise PeerTimeoutError(message[1:].decode())

    def _wait_for_all(self) -> None:
        if self._hub is None:
            return
        self._channels = dict(sorted(self._hub.channels(self.timeout_s).items()))
        missing = [rank for rank in range(1, self.size) if rank not in self._channels]
        if missing:
            self._fail(missing, f"did not join within {self.timeout_s:g} s")
        self._hub = None

    def _fail(self, ranks: list[int], what: str, cause: OSError | None = None) -> NoReturn:
        """Rank 0 tells the others, too, who else would only miss rank 0."""
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        text = f"{names} of the {self.size} of this component {what}"
        for rank, peer in self._channels.items():
            if not self.rank and rank not in ranks:
                with suppress(OSError):  # it is gone, too
                    peer.send(_FAILURE + text.encode(), timeout_s=_FAREWELL_S)
            peer.close()
        raise PeerTimeoutError(text) from cause


def _call(host: str, port: int, rank: int, key: bytes, deadline: float) -> Channel:
    """Tries again until it is let in: rank 0 may not listen yet."""
    pause, stranger = _POLL_S, None
    while True:
        left = deadline - time.monotonic()
        try:
            return channel.call(host, port, rank, key, timeout_s=max(min(left, _CALL_S), _POLL_S))
        except OSError as error:
            stranger = error if isinstance(error, StrangerError) else stranger
            if time.monotonic() + pause > deadline:
                raise PeerTimeoutError(
                    f"rank 0 of this component did not let rank {rank} in at {host}:{port}: "
                    f"{stranger or error}"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _wait_for_record(path: Path, deadline: float, timeout_s: float) -> Any:  # noqa: ANN401
    while (record := read_json(path)) is None:
        if time.monotonic() > deadline:
            raise PeerTimeoutError(f"rank 0 wrote no {path} within {timeout_s:.0f} s")
        time.sleep(_POLL_S)
    return record
