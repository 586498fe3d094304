"""Doors of MPI: one opens a port and accepts, others call it (MPI-4, chapter 11).

MPICH can connect any two processes; Open MPI under PMIx cannot. MPI spins while it waits, stops
other threads meanwhile, and may end its process: so a door between worlds is a process of its own
(`DoorProcess`), started by MPICH's `mpiexec`, and its parent speaks to it in lines of JSON. Where
one world holds both ends, a door is a thread of each (`DoorThread`), and a port is a rank.

A message is JSON in a frame of fixed size with a MAC under the run's secret: nothing is unpickled,
and a stranger's bytes have a length that we chose.
"""

import hmac
import json
import logging
import os
import queue
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

from relax_hpc.runtime.files.run_secret import derive, sign
from relax_hpc.runtime.process import without_mpi

log = logging.getLogger(__name__)

FRAME = 8192
"""Bytes of every message."""
_MAC, _NONCE = 32, 32
_HEAD = struct.Struct(f">{_MAC}sI")
"""MAC and length of the JSON."""
ROOM = FRAME - _HEAD.size
_TAG = 4711
_ACCEPT_S = 1
"""MPICH takes whole seconds."""
_CONNECT_S = 10
_HANDSHAKE_S = 5.0
_START_S = 20.0
_IDLE_S = 0.01
_HEAD_START_S = 0.05
"""Time for handshakes before MPI spins for the next one."""


REMEDY = "pip install 'relax-hpc[mpi]'"
MISSING = f"MPICH is not installed ({REMEDY})"


class LinkError(ConnectionError):
    """The other end is gone, or a stranger."""


class Link:
    """Messages to and from one process, over an MPI communicator that holds it."""

    def __init__(self, comm: Any, peer: int) -> None:  # noqa: ANN401
        self._comm, self.peer = comm, peer
        self._in = self._out = b""
        self._received = self._num_sent = 0
        self._frame = bytearray(FRAME)
        self._request: Any = None
        self._sending: list[tuple[Any, bytes]] = []

    def send(self, message: object) -> None:
        """Returns at once; whether it arrives, an answer says.

        Raises:
            LinkError: longer than `ROOM` as JSON.
        """
        text = json.dumps(message).encode()
        if len(text) > ROOM:
            raise LinkError(f"a message of {len(text)} bytes; a frame holds {ROOM}")
        mac = sign(self._out, self._num_sent, text)
        frame = (_HEAD.pack(mac, len(text)) + text).ljust(FRAME, b"\0")
        self._num_sent += 1
        self._sending = [(request, f) for request, f in self._sending if not request.Test()]
        self._sending.append((self._comm.Isend(frame, dest=self.peer, tag=_TAG), frame))

    def poll(self) -> Any:  # noqa: ANN401
        """Returns the next message; None if there is none yet.

        Raises:
            LinkError: it is not from the other end, or not its next one.
        """
        if self._request is None:
            self._request = self._comm.Irecv(self._frame, source=self.peer, tag=_TAG)
        if not self._request.Test():
            return None
        self._request = None
        mac, length = _HEAD.unpack_from(self._frame)
        text = bytes(self._frame[_HEAD.size : _HEAD.size + min(length, ROOM)])
        if not hmac.compare_digest(mac, sign(self._in, self._received, text)):
            raise LinkError("what came does not have the right MAC")
        self._received += 1
        return json.loads(text)

    def prove(
        self, key: bytes, name: str, *, is_server: bool
    ) -> Generator[None, None, dict[str, Any]]:
        """Shows that both ends know the key; yields while it waits, returns the other end's hello.

        Session keys come from fresh nonces of both ends, and messages are counted: replays fail.

        Raises:
            LinkError: the other end does not know the key, or is silent.
        """
        deadline = time.monotonic() + _HANDSHAKE_S
        self._in = self._out = key
        own = secrets.token_hex(_NONCE)
        self.send({"name": name, "nonce": own, "server": is_server})
        while (hello := self.poll()) is None:
            yield from _until(deadline)
        if hello["server"] == is_server:
            raise LinkError("our own words came back")
        nonces = [own, hello["nonce"]] if is_server else [hello["nonce"], own]
        session = derive(key, "/".join(nonces))
        ways = derive(session, "up"), derive(session, "down")
        self._in, self._out = ways if is_server else ways[::-1]
        self._received = self._num_sent = 0
        self.send("ready")
        while (word := self.poll()) is None:
            yield from _until(deadline)
        if word != "ready":
            raise LinkError("the other end does not know the key")
        return dict(hello)

    def close(self) -> None:
        """Gives up the other end, and waits for nothing: MPI's own disconnect would."""
        if self._request is not None:
            self._request.Cancel()


def _until(deadline: float) -> Generator[None, None, None]:
    if time.monotonic() > deadline:
        raise LinkError("the other end said nothing")
    yield


class MpiDoor:
    """Carries out orders, and reports what it did and heard."""

    def __init__(self, key: bytes, name: str, say: Callable[..., None]) -> None:
        from mpi4py import MPI

        self._mpi, self._key, self._name, self._say = MPI, key, name, say
        self.library = " ".join(MPI.Get_library_version().split("\n")[0].split())
        self._port = ""
        self._expected: set[str] = set()
        self._links = dict[str, Link]()
        self._meetings: list[tuple[Link, Generator[None, None, dict[str, Any]]]] = []
        self.orders = queue.Queue[dict[str, Any]]()
        self.is_closed = False

    def run(self) -> None:
        while not self.is_closed:
            self._hear()
            if len(self._expected - self._links.keys()) > len(self._meetings):
                self._accept()
            deadline = time.monotonic() + _HEAD_START_S
            while self._meetings and time.monotonic() < deadline:
                self._meet()
            for name, link in list(self._links.items()):
                self._guard(name, lambda name=name, link=link: self._pass_on(name, link))

    def _hear(self) -> None:
        with suppress(queue.Empty):
            self._obey(self.orders.get(timeout=0 if self._meetings else _IDLE_S))
            while True:
                self._obey(self.orders.get_nowait())

    def _obey(self, order: dict[str, Any]) -> None:
        match order:
            case {"accept": names}:
                self._expected = set(names)
                for name in self._links.keys() - self._expected:
                    self._links.pop(name).close()
                self._port = self._port or self._open()
                self._say(port=self._port)
            case {"call": port}:
                self._call(port)
            case {"to": name, "message": message} if name in self._links:
                self._guard(name, lambda: self._links[name].send(message))
            case {"to": name}:
                self._say(lost=name, why="there is no link")

    def _open(self) -> str:
        return str(self._mpi.Open_port())

    def _call(self, port: str) -> None:
        try:
            comm = self._mpi.COMM_SELF.Connect(port, self._patience(_CONNECT_S))
        except self._mpi.Exception as error:
            self._say(failed=_last_line(error))
            return
        self._greet(comm, 0, is_server=False)

    def _accept(self) -> None:
        with suppress(self._mpi.Exception):  # nobody came
            comm = self._mpi.COMM_SELF.Accept(self._port, self._patience(_ACCEPT_S))
            self._greet(comm, 0, is_server=True)

    def _patience(self, seconds: int) -> Any:  # noqa: ANN401
        info = self._mpi.Info.Create()
        info.Set("timeout", str(seconds))
        return info

    def _greet(self, comm: Any, peer: int, *, is_server: bool) -> None:  # noqa: ANN401
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        link = Link(comm, peer)
        self._meetings.append((link, link.prove(self._key, self._name, is_server=is_server)))

    def _meet(self) -> None:
        for link, meeting in list(self._meetings):
            try:
                next(meeting)
                continue
            except StopIteration as end:
                name = str(end.value["name"])
                if before := self._links.get(name):
                    before.close()
                self._links[name] = link
                self._say(linked=name)
            except (LinkError, self._mpi.Exception, ValueError, KeyError, TypeError) as error:
                link.close()
                self._say(stranger=_last_line(error))
            self._meetings.remove((link, meeting))

    def _pass_on(self, name: str, link: Link) -> None:
        while (message := link.poll()) is not None:
            self._say(by=name, message=message)

    def _guard(self, name: str, act: Any) -> None:  # noqa: ANN401
        try:
            act()
        except (LinkError, self._mpi.Exception, ValueError) as error:
            self._links.pop(name).close()
            self._say(lost=name, why=_last_line(error))


class WorldDoor(MpiDoor):
    """A door to ranks of COMM_WORLD."""

    @property
    def is_shared(self) -> bool:
        """Returns whether MPI lets this thread speak beside the process's others."""
        return bool(self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE)

    def _open(self) -> str:
        return str(self._mpi.COMM_WORLD.rank)

    def _call(self, port: str) -> None:
        self._greet(self._mpi.COMM_WORLD, int(port), is_server=False)

    def _accept(self) -> None:
        world = self._mpi.COMM_WORLD
        known = {
            link.peer for link in [*self._links.values(), *(each for each, _ in self._meetings)]
        }
        for rank in range(world.size):
            if rank not in known and world.Iprobe(rank, _TAG):
                self._greet(world, rank, is_server=True)


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


class DoorEnd:
    """The owner's end of a door."""

    def __init__(self, hear: Callable[[str, Any], None]) -> None:
        self.problem = ""
        """Says what is wrong with it."""
        self.library = ""
        self._hear, self._changed = hear, threading.Condition()
        self._port, self._links, self._failed = "", set[str](), ""

    @property
    def has_died(self) -> bool:
        """Whether it was there, and is no more; one that never was will not be another time."""
        return bool(self.problem and self.library)

    @property
    def links(self) -> set[str]:
        """Names of those at the other end of a link."""
        with self._changed:
            return set(self._links)

    def accept(self, names: Collection[str]) -> str:
        """Lets these in from now on, and gives up links to others. Returns the port."""
        with self._changed:
            self._links &= set(names)
        self._tell(accept=sorted(names))
        return self._port if self._wait(lambda: self._port, _START_S) else ""

    def wait_for(self, names: Collection[str], timeout_s: float) -> None:
        """Waits for links to all of these."""
        self._wait(lambda: self._links >= set(names), timeout_s)

    def call(self, port: str) -> str:
        """Connects to another door. Returns why it could not; "" if it did."""
        with self._changed:
            self._links.clear()
            self._failed = ""
        self._tell(call=port)
        self._wait(lambda: self._links or self._failed, _START_S)
        return "" if self.links else self._failed or self.problem or "it took too long"

    def send(self, name: str, message: object) -> None:
        self._tell(to=name, message=message)

    def close(self) -> None:
        raise NotImplementedError

    def _tell(self, **order: object) -> None:
        raise NotImplementedError

    def _wait(self, is_true: Callable[[], object], timeout_s: float) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: is_true() or self.problem, timeout_s))

    def _note(self, **said: Any) -> None:  # noqa: ANN401
        """Takes a report of the door."""
        if "by" in said:
            self._hear(said["by"], said["message"])
            return
        with self._changed:
            match said:
                case {"library": library}:
                    self.library = library
                case {"port": port}:
                    self._port = port
                case {"linked": name}:
                    self._links.add(name)
                case {"lost": name, "why": why}:
                    self._links.discard(name)
                    log.warning("MPI: %s is lost: %s", name, why)
                case {"failed": why} | {"stranger": why}:
                    self._failed = why
                    log.info("MPI: %s", why)
            self._changed.notify_all()

    def _end(self, why: str) -> None:
        """Wakes who waits for a door that is no more."""
        with self._changed:
            self.problem = self.problem or why
            self._links.clear()
            self._changed.notify_all()


class DoorProcess(DoorEnd):
    """Starts the process, and ends it."""

    def __init__(self, name: str, key: bytes, hear: Callable[[str, Any], None]) -> None:
        """Starts it.

        Args:
            name: told to those at the other end.
            key: equal at both ends, and secret.
            hear: called with the name of who sent a message, and the message, in a thread.
        """
        super().__init__(hear)
        self._writing = threading.Lock()
        launcher = find_launcher()
        if launcher is None:
            self.problem = MISSING
            return
        self._process = subprocess.Popen(
            [*launcher, sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=_environment(launcher[0]), start_new_session=True,
        )  # fmt: skip
        self._tell(key=key.hex(), name=name)
        threading.Thread(target=self._read, name="mpi door", daemon=True).start()

    def close(self) -> None:
        """Ends the process."""
        if self.problem:
            return
        self.problem = "it was closed"
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _tell(self, **order: object) -> None:
        if not self.problem:
            with self._writing, suppress(OSError):  # it has ended, as its output says
                assert self._process.stdin
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout
        reason = ""
        for line in self._process.stdout:
            said = json.loads(line)
            reason = said.get("broken", reason)
            self._note(**said)
        ended = f"the process of MPI ended with {self._process.wait()}"
        self._end(reason or ended)


class DoorThread(DoorEnd):
    """Serves ranks of this process's own world, which MPI has begun."""

    def __init__(self, name: str, key: bytes, hear: Callable[[str, Any], None]) -> None:
        super().__init__(hear)
        self._door = WorldDoor(key, name, self._note)
        if not self._door.is_shared:
            self.problem = f"{self._door.library} gives only one thread of a process a voice"
            return
        self.library = self._door.library
        self._thread = threading.Thread(target=self._run, name="mpi door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self.problem:
            self.problem = "it was closed"
            self._door.is_closed = True
            self._thread.join()  # before MPI ends

    def _run(self) -> None:
        try:
            self._door.run()
        except Exception as error:
            log.exception("MPI: the door has ended")
            self._end(_last_line(error))

    def _tell(self, **order: object) -> None:
        self._door.orders.put(order)


def door_type(*, is_one_world: bool) -> type[DoorProcess | DoorThread]:
    """Returns the kind of door for tasks whose components make one world, if MPI has begun here; a
    local run of such a job does without."""
    return DoorThread if is_one_world and "mpi4py.MPI" in sys.modules else DoorProcess


def find_launcher() -> list[str] | None:
    """Returns the command that starts one process of MPICH on this node."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if found := shutil.which("mpiexec.gforker", path=places):
        return [found, "-n", "1"]
    if found := shutil.which("mpiexec.hydra", path=places):
        return [found, "-launcher", "fork", "-rmk", "user", "-hosts", "localhost", "-n", "1"]
    return None


def _environment(launcher: str) -> dict[str, str]:
    """Returns the environment without what Slurm and other MPIs left there for their own ranks."""
    kept = {
        name: value
        for name, value in without_mpi(os.environ).items()
        if not name.startswith("SLURM_")
    }
    library = Path(launcher).resolve().parent.parent / "lib" / "libmpi.so.12"
    if library.exists():
        kept["MPI4PY_LIBMPI"] = str(library)  # not that of this process, if it is a rank
    interface = kept.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface and interface != "lo":
        kept.setdefault("UCX_NET_DEVICES", interface)
        kept.setdefault("FI_TCP_IFACE", interface)
    # TCP alone. By the kernel's number two jobs of one node pass for neighbours, but Slurm may keep
    # their shared memory apart (job_container/tmpfs).
    kept |= {"UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp"}
    return kept | {"UCX_LOG_LEVEL": "fatal"}  # of those who left, it says more than we want


def main() -> None:
    start = json.loads(sys.stdin.buffer.readline())
    door = MpiDoor(bytes.fromhex(start["key"]), start["name"], _say)
    if door.library.startswith("Open MPI"):
        library = door.library.partition(",")[0]
        _say(broken=f"mpi4py took {library}, whose ports need a server; {REMEDY}")
        return
    _say(library=door.library)
    threading.Thread(target=_listen, args=(door,), daemon=True).start()
    try:
        door.run()
    except Exception as error:  # of a library without ports
        _say(broken=f"{door.library}: {_last_line(error)}")
        raise


def _listen(door: MpiDoor) -> None:
    """Ends this process with its parent, even from within a call of MPI."""
    for line in sys.stdin.buffer:
        door.orders.put(json.loads(line))
    os._exit(0)  # MPI's finalize could wait for the dead


def _say(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
