"""Joins the ranks of one component and exchanges small objects between them.

Two bootstraps, one interface: MPI (Slurm starts the ranks, mpi4py joins them), or files (a record
in the run directory says where rank 0 listens, and rank 0 relays messages over TCP). A world in
which a rank leaves or is silent for too long is over; the error names that rank. Tensors go through
`torch_group`.

Both ends of a connection prove that they know the run's key (`run_secret`). Every message carries a
MAC, which is checked before anything is unpickled; session keys come from fresh nonces of both
ends, and messages are counted, so replays fail. Nothing is encrypted. Each new connection gets a
thread and a few seconds to prove itself, so silent strangers delay nobody; once all ranks are in,
nothing listens.
"""

import ctypes
import hashlib
import hmac
import os
import pickle
import secrets
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self

import numpy as np

from relax_hpc.errors import LaunchError, PeerTimeoutError
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.comm.address import listener, node_address, reach
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.files.run_secret import RunSecret, derive, sign

_MPI_PIECE = 1 << 30  # MPI counts bytes in an int
_ROLL_S = 10.0
"""Seconds for ranks to answer a roll call."""


class World(Protocol):
    """Ranks that act together; all of them call every method in the same order."""

    rank: int
    size: int
    timeout_s: float
    """Longest silence of a rank, here and in a collective of torch."""

    def bcast(self, value: Any) -> Any:  # noqa: ANN401
        """Returns rank 0's `value` on every rank; ignores the other ranks' argument."""
        ...

    def allgather(self, value: Any) -> list[Any]:  # noqa: ANN401
        """Returns every rank's `value`, in rank order."""
        ...

    def barrier(self) -> None: ...

    def split(self, color: int) -> "World":
        """Returns the world of the ranks with the same `color`, in the same order."""
        ...


def _name_ranks(ranks: list[int], size: int) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {names} of the {size} of this component"


class SoloWorld:
    """A world of one rank."""

    rank, size, timeout_s = 0, 1, 300.0

    def bcast(self, value: Any) -> Any:  # noqa: ANN401
        return value

    def allgather(self, value: Any) -> list[Any]:  # noqa: ANN401
        return [value]

    def barrier(self) -> None: ...

    def split(self, color: int) -> World:
        return self


class MpiWorld:
    """The ranks of an MPI communicator.

    Raises:
        PeerTimeoutError: by every method, when ranks were silent for too long; they are named. The
            world is unusable then.
    """

    def __init__(self, comm: Any, *, timeout_s: float = 300) -> None:  # noqa: ANN401
        """Duplicates an mpi4py communicator; collective."""
        self._comm, self.timeout_s = comm, timeout_s
        self._calls = comm.Dup()
        """For roll calls only."""
        self.rank, self.size = comm.rank, comm.size

    @classmethod
    def of_step(
        cls, expected_size: int, role: str | None = None, *, timeout_s: float = 300
    ) -> Self:
        """Returns COMM_WORLD of the Slurm step, or its ranks with the same `role`."""
        choose_library()
        from mpi4py import MPI  # initialises MPI: only ranks of an MPI step may import it

        comm: MPI.Comm = MPI.COMM_WORLD
        if role is not None:
            roles = comm.allgather(role)
            comm = comm.Split(roles.index(role), comm.rank)
        world = cls(comm, timeout_s=timeout_s)
        if world.size != expected_size:
            raise LaunchError(
                f"MPI sees {world.size} ranks where the launcher started {expected_size}: "
                "resources.mpi does not fit this MPI library; "
                "use pmix for Open MPI, pmi2 for MPICH (srun --mpi=list)"
            )
        return world

    @heartbeat.phase("ranks", waits=True)
    def bcast(self, value: Any) -> Any:  # noqa: ANN401
        if self.size == 1:
            return value
        content = pickle.dumps(value) if self.rank == 0 else b""
        size = np.array([len(content)], dtype=np.int64)
        self._wait(self._comm.Ibcast(size, root=0))
        buffer = memoryview(bytearray(content) if self.rank == 0 else bytearray(int(size[0])))
        for first in range(0, len(buffer), _MPI_PIECE):
            self._wait(self._comm.Ibcast(buffer[first : first + _MPI_PIECE], root=0))
        return value if self.rank == 0 else pickle.loads(buffer)  # written by our own rank 0

    @heartbeat.phase("ranks", waits=True)
    def allgather(self, value: Any) -> list[Any]:  # noqa: ANN401
        content = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.empty(self.size, np.int64)
        self._wait(self._comm.Iallgather(np.array([len(content)], np.int64), sizes))
        ends = np.cumsum(sizes)
        found = np.empty(ends[-1], np.uint8)
        self._wait(self._comm.Iallgatherv(content, [found, (sizes, ends - sizes)]))
        # Written by ranks of our own.
        return [pickle.loads(part.tobytes()) for part in np.split(found, ends[:-1])]

    @heartbeat.phase("ranks", waits=True)
    def barrier(self) -> None:
        self._wait(self._comm.Ibarrier())

    @heartbeat.phase("ranks", waits=True)
    def split(self, color: int) -> World:
        self.barrier()
        return MpiWorld(self._comm.Split(color, self.rank), timeout_s=self.timeout_s)

    def _wait(self, request: Any) -> None:  # noqa: ANN401
        """Sleeps between tests: MPI's waiting spins, and ranks may wait minutes for a batch."""
        pause, deadline = 1e-4, time.monotonic() + self.timeout_s
        while not request.Test():
            if time.monotonic() > deadline or self._calls.Iprobe():
                self._fail()
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def _fail(self) -> NoReturn:
        """Calls the roll to name the silent ranks; other waiting ranks answer with a call of their
        own."""
        nothing = np.empty(0, np.uint8)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent = [self._calls.Isend(nothing, dest=rank) for rank in others]
        missing = set(others)
        deadline = time.monotonic() + min(_ROLL_S, self.timeout_s)
        while missing and time.monotonic() < deadline:
            while self._calls.Iprobe():
                missing.discard(self._heard())
            time.sleep(0.01)
        del sent  # to ranks that are gone or stopped they never end
        if not missing:
            raise PeerTimeoutError(
                f"all {self.size} ranks of this component wait, for different things"
            )
        who = _name_ranks(sorted(missing), self.size)
        raise PeerTimeoutError(f"{who} said nothing for {self.timeout_s:g} s")

    def _heard(self) -> int:
        from mpi4py import MPI

        status = MPI.Status()
        self._calls.Recv(np.empty(0, np.uint8), status=status)
        return int(status.Get_source())


def choose_library() -> None:
    """Takes Open MPI where Slurm speaks PMIx, which MPICH's wheel in the environment does not."""
    if "PMIX_NAMESPACE" in os.environ and "MPI4PY_LIBMPI" not in os.environ:
        with suppress(OSError):
            ctypes.CDLL(_OPEN_MPI)
            os.environ["MPI4PY_LIBMPI"] = _OPEN_MPI


_OPEN_MPI = "libmpi.so.40"
_NONCE, _MAC = 32, 32
_HELLO = struct.Struct(f">Q{_NONCE}s")
"""Rank of the connecting process, and its nonce."""
_HEAD = struct.Struct(f">Q{_MAC}s")
"""Bytes of a message, and the MAC of that number: a length is trusted only then."""
_PIECE = 1 << 20


class StrangerError(ConnectionError):
    """The other end does not know the key, or somebody altered the message."""


class Channel:
    def __init__(self, connection: socket.socket, session: bytes, *, is_server: bool) -> None:
        self._connection = connection
        ways = (derive(session, "up"), derive(session, "down"))
        self._in, self._out = ways if is_server else ways[::-1]
        self._received = self._sent = 0

    # A length (8 bytes) and a digest (32 bytes) are signed, so neither passes for the other.
    def send(self, message: bytes, *, timeout_s: float) -> None:
        """Blocks until the kernel has all of it.

        Raises:
            OSError: the other end is gone, or accepts too slowly.
        """
        head = sign(self._out, self._sent, struct.pack(">Q", len(message)))
        body = sign(self._out, self._sent, hashlib.sha256(message).digest())
        self._sent += 1
        self._connection.settimeout(timeout_s)
        self._connection.sendall(_HEAD.pack(len(message), head))
        self._connection.sendall(message)
        self._connection.sendall(body)

    def receive(self, *, timeout_s: float) -> bytearray:
        """Returns the next message.

        Args:
            timeout_s: of silence.

        Raises:
            TimeoutError: of silence.
            StrangerError: it is not from the other end, or not its next one.
            OSError: the other end is gone.
        """
        size, head = _HEAD.unpack(_read(self._connection, _HEAD.size, silence_s=timeout_s))
        _check(head, sign(self._in, self._received, struct.pack(">Q", size)))
        message = _read(self._connection, size, silence_s=timeout_s)
        mac = _read(self._connection, _MAC, silence_s=timeout_s)
        _check(bytes(mac), sign(self._in, self._received, hashlib.sha256(message).digest()))
        self._received += 1
        return message

    def has_spoken(self) -> bool:
        """Whether unread data is here."""
        self._connection.settimeout(0)
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def close(self) -> None:
        self._connection.close()


def call(host: str, port: int, rank: int, key: bytes, *, timeout_s: float) -> Channel:
    """Connects to a process that calls `answer`.

    Raises:
        OSError: nobody answers in time, or a stranger does.
    """
    deadline = time.monotonic() + timeout_s
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        _no_delay(connection)
        hello = _HELLO.pack(rank, secrets.token_bytes(_NONCE))
        connection.sendall(hello)
        nonce = bytes(_read(connection, _NONCE, deadline=deadline))
        proof = bytes(_read(connection, _MAC, deadline=deadline))
        _check(proof, _proof(key, "server", hello, nonce))
        connection.sendall(_proof(key, "client", hello, nonce))
        channel = Channel(connection, _proof(key, "session", hello, nonce), is_server=False)
        channel.receive(timeout_s=max(deadline - time.monotonic(), 0.1))  # it was let in
    except BaseException:
        connection.close()
        raise
    return channel


def answer(connection: socket.socket, key: bytes, *, timeout_s: float) -> tuple[int, Channel]:
    """Verifies that the connecting process knows the key. Returns its rank, too.

    Raises:
        OSError: it is silent, gone, or a stranger.
    """
    deadline = time.monotonic() + timeout_s
    connection.settimeout(timeout_s)
    _no_delay(connection)
    hello = bytes(_read(connection, _HELLO.size, deadline=deadline))
    nonce = secrets.token_bytes(_NONCE)
    connection.sendall(nonce + _proof(key, "server", hello, nonce))
    proof = bytes(_read(connection, _MAC, deadline=deadline))
    _check(proof, _proof(key, "client", hello, nonce))
    rank, _ = _HELLO.unpack(hello)
    return rank, Channel(connection, _proof(key, "session", hello, nonce), is_server=True)


def _proof(key: bytes, who: str, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, who.encode() + hello + nonce, "sha256")


def _check(given: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(given, expected):
        raise StrangerError("what came does not have the right MAC")


def _read(
    connection: socket.socket,
    size: int,
    *,
    silence_s: float | None = None,
    deadline: float = 0.0,
) -> bytearray:
    """Reads exactly `size` bytes; limits either the silence between two pieces or the whole."""
    content, at = bytearray(size), 0
    view = memoryview(content)
    while at < size:
        wait_s = silence_s if silence_s is not None else deadline - time.monotonic()
        if wait_s <= 0:
            raise TimeoutError("it says too little")
        connection.settimeout(wait_s)
        count = connection.recv_into(view[at : at + _PIECE])
        if not count:
            raise ConnectionResetError("it has closed the connection")
        at += count
    return content


def _no_delay(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


_HANDSHAKE_S = 10.0
_MOST_STRANGERS = 256
"""Most unauthenticated connections; beyond, the oldest are closed."""
_WELCOME = b"welcome"


class Hub:
    """Rank 0's channels to ranks 1 to size - 1."""

    def __init__(self, size: int, key: bytes) -> None:
        self._size, self._key = size, key
        self._listener = listener(node_address(), socket.SOMAXCONN)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._channels: dict[int, Channel] = {}
        self._joined = threading.Condition()
        self._strangers: dict[socket.socket, None] = {}
        threading.Thread(target=self._listen, name="ranks that join", daemon=True).start()

    def channels(self, timeout_s: float) -> dict[int, Channel]:
        """Waits for all ranks; after `timeout_s`, returns those that came."""
        with self._joined:
            self._joined.wait_for(lambda: len(self._channels) == self._size - 1, timeout_s)
            return dict(self._channels)

    def close(self) -> None:
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # no descriptors left, for now
                continue
            with self._joined:
                self._strangers[connection] = None
                while len(self._strangers) > _MOST_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            threading.Thread(target=self._meet, args=(connection,), daemon=True).start()

    def _meet(self, connection: socket.socket) -> None:
        try:
            rank, channel = answer(connection, self._key, timeout_s=_HANDSHAKE_S)
            self._admit(rank, channel)
        except OSError:
            connection.close()
        finally:
            with self._joined:
                self._strangers.pop(connection, None)

    def _admit(self, rank: int, channel: Channel) -> None:
        """A rank that connects again missed our reply; its newest connection counts."""
        if not 0 < rank < self._size:
            channel.close()
            return
        with self._joined:
            if len(self._channels) == self._size - 1:
                channel.close()
                return
            channel.send(_WELCOME, timeout_s=_HANDSHAKE_S)
            if before := self._channels.get(rank):
                before.close()
            self._channels[rank] = channel
            if len(self._channels) == self._size - 1:
                self.close()
                self._joined.notify_all()


_POLL_S = 0.05
_CALL_S = 30.0
"""Limit of one attempt to join; rank 0 may hold the interpreter's lock."""
_FAREWELL_S = 1.0
_VALUE, _FAILURE = b"v", b"x"


class StarWorld:
    """A world over TCP; rank 0 relays every message.

    Raises:
        PeerTimeoutError: by every method, when a rank is gone or silent for too long; it is named.
            The world is unusable then.
    """

    def __init__(
        self, rank: int, size: int, key: bytes, end: Hub | Channel | None, *, timeout_s: float
    ) -> None:
        """Takes as `end` rank 0's hub, another rank's channel, or None for a single rank."""
        self.rank, self.size = rank, size
        self._key, self.timeout_s, self._splits = key, timeout_s, 0
        self._hub = end if isinstance(end, Hub) else None
        self._channels = {0: end} if isinstance(end, Channel) else dict[int, Channel]()

    @classmethod
    def join(cls, rank: int, size: int, rendezvous: Path, key: bytes, *, timeout_s: float) -> Self:
        """Finds rank 0 by a record on the shared file system, which rank 0 writes.

        Args:
            rendezvous: that record; its name must be new for every start.
            key: equal on all ranks, and secret.
            timeout_s: longest silence of a rank.
        """
        if rank == 0:
            hub = Hub(size, key)
            host, port = hub.address
            write_json(rendezvous, {"host": host, "port": port, "node": socket.gethostname()})
            return cls(rank, size, key, hub, timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        record = _wait_for_record(rendezvous, deadline, timeout_s)
        end = _call(record["host"], record["port"], rank, key, deadline, f" on {record['node']}")
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
        self._wait_for_all()
        message = _VALUE + pickle.dumps(value) if self._channels else b""
        for rank in self._channels:
            self._send(rank, message)

    def _hear(self) -> list[Any]:
        """Receives one value from every other rank, in rank order."""
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
        """Reads the reason that rank 0 may have sent before it left."""
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
        """On rank 0, tells the others the cause: they would only see rank 0 leave."""
        text = f"{_name_ranks(ranks, self.size)} {what}"
        for rank, peer in self._channels.items():
            if not self.rank and rank not in ranks:
                with suppress(OSError):  # it is gone, too
                    peer.send(_FAILURE + text.encode(), timeout_s=_FAREWELL_S)
            peer.close()
        raise PeerTimeoutError(text) from cause


def _call(host: str, port: int, rank: int, key: bytes, deadline: float, where: str = "") -> Channel:
    """Retries until it is let in: rank 0 may be busy."""
    left = max(deadline - time.monotonic(), _POLL_S)
    reach(host, port, f"rank {rank}", f"rank 0 of this component{where}", timeout_s=left)
    pause, stranger = _POLL_S, None
    while True:
        left = deadline - time.monotonic()
        try:
            return call(host, port, rank, key, timeout_s=max(min(left, _CALL_S), _POLL_S))
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


def abandon() -> None:
    """Lets this process exit after an error: MPI_Finalize would wait for ranks that may wait for
    it."""
    if "mpi4py.MPI" in sys.modules:
        from mpi4py.run import set_abort_status

        set_abort_status(1)


def connect(
    bootstrap: str,
    *,
    rank: int,
    size: int,
    rendezvous: Path,
    secret: RunSecret,
    timeout_s: float = 300,
    role: str = "",
) -> World:
    """Joins the ranks of this component.

    Args:
        bootstrap: "mpi"; "mpi_job", where other components share the world; or "files".
        rank: from the launcher; with MPI the communicator decides.
        size: tasks the launcher started; a world of another size is an error.
        rendezvous: record that rank 0 writes; its name must be new for every start.
        secret: of the run; without MPI, ranks that do not know it are refused.
        timeout_s: longest silence of a rank.
        role: of this component, which tells it from the others in the job's world.

    Raises:
        LaunchError: MPI made worlds of the wrong size.
        PeerTimeoutError: rank 0 did not write the rendezvous record.
    """
    if bootstrap == "mpi":
        return MpiWorld.of_step(size, timeout_s=timeout_s)
    if bootstrap == "mpi_job":
        return MpiWorld.of_step(size, role, timeout_s=timeout_s)
    if size == 1:
        return SoloWorld()
    key = secret.derive(f"world/{rendezvous.name}")  # what was said in another start is void
    return StarWorld.join(rank, size, rendezvous, key, timeout_s=timeout_s)
