"""The ranks of one component, and the small objects they agree on.

Two ways in, one interface: MPI (Slurm starts the ranks, mpi4py joins them), or files (a TCP store
whose address is a record in the run directory) for launchers without MPI. Tensors never go this
way: `torch_group` and `broadcast` carry them.
"""

import pickle
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from relax_hpc.errors import LaunchError, PeerTimeoutError
from relax_hpc.records import read_json, write_json

_POLL_S = 0.05
_MPI_PIECE = 1 << 30  # MPI counts bytes in an int


class World(Protocol):
    """Ranks that act together; every method is called by all of them in the same order."""

    rank: int
    size: int

    def bcast(self, value: Any) -> Any:  # noqa: ANN401
        """Rank 0's `value`, on every rank; other ranks' argument is ignored."""
        ...

    def allgather(self, value: Any) -> list[Any]:  # noqa: ANN401
        """Every rank's `value`, in rank order."""
        ...

    def barrier(self) -> None: ...

    def split(self, color: int) -> "World":
        """The world of the ranks that give the same `color`, in the same order."""
        ...


class SoloWorld:
    """A world of one: nothing to agree on."""

    rank, size = 0, 1

    def bcast(self, value: Any) -> Any:  # noqa: ANN401
        return value

    def allgather(self, value: Any) -> list[Any]:  # noqa: ANN401
        return [value]

    def barrier(self) -> None: ...

    def split(self, color: int) -> World:
        return self


class MpiWorld:
    """The ranks of an MPI communicator."""

    def __init__(self, comm: Any) -> None:  # noqa: ANN401
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size

    @classmethod
    def of_step(cls, expected_size: int, role: str | None = None) -> Self:
        """COMM_WORLD of the step that Slurm started; of it, the ranks that give the same `role`."""
        from mpi4py import MPI  # initialises MPI: only ranks of an MPI step may import it

        comm: MPI.Comm = MPI.COMM_WORLD
        if role is not None:
            roles = comm.allgather(role)
            comm = comm.Split(roles.index(role), comm.rank)
        world = cls(comm)
        if world.size != expected_size:
            raise LaunchError(
                f"MPI sees {world.size} ranks where the launcher started {expected_size}: "
                "resources.mpi does not fit this MPI library; "
                "use pmix for Open MPI, pmi2 for MPICH (srun --mpi=list)"
            )
        return world

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

    def allgather(self, value: Any) -> list[Any]:  # noqa: ANN401
        self.barrier()
        return list(self._comm.allgather(value))

    def barrier(self) -> None:
        self._wait(self._comm.Ibarrier())

    def split(self, color: int) -> World:
        self.barrier()
        return MpiWorld(self._comm.Split(color, self.rank))

    @staticmethod
    def _wait(request: Any) -> None:  # noqa: ANN401
        """Waits asleep. MPI's own waiting spins, and a rank may wait minutes for a batch."""
        pause = 1e-4
        while not request.Test():
            time.sleep(pause)
            pause = min(2 * pause, 0.01)


class StoreWorld:
    """Ranks that meet in a TCP store. Whoever is the last to read a value deletes it.

    Raises:
        PeerTimeoutError: by every method, when a rank is gone or silent for too long.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:  # noqa: ANN401
        self.rank, self.size = rank, size
        self._store, self._calls = store, 0  # torch's stub of a store allows str values only

    @classmethod
    def join(cls, rank: int, size: int, rendezvous: Path, *, timeout_s: float) -> Self:
        """Finds rank 0's store by a record on the shared file system; rank 0 makes both."""
        from torch.distributed import TCPStore

        timeout = timedelta(seconds=timeout_s)
        if rank == 0:
            host = node_address()
            store = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
            write_json(rendezvous, {"host": host, "port": store.port})
            return cls(rank, size, store)
        record = wait_for_record(rendezvous, timeout_s=timeout_s, peer="rank 0")
        return cls(rank, size, TCPStore(record["host"], record["port"], None, False, timeout))

    def bcast(self, value: Any) -> Any:  # noqa: ANN401
        key = self._next_key()
        if self.rank == 0:
            if self.size > 1:
                self._store.set(key, pickle.dumps(value))
            return value
        (content,) = self._wait([key])
        self._read(key, [key], readers=self.size - 1)
        return pickle.loads(content)  # written by our own rank 0

    def allgather(self, value: Any) -> list[Any]:  # noqa: ANN401
        key = self._next_key()
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], pickle.dumps(value))
        contents = self._wait(keys)
        done = f"{key}/done"
        if self._read(key, keys, readers=self.size):
            self._store.set(done, b"")
        if self.rank == 0:  # may hold the store, and must not leave while others need it
            self._wait([done])
            self._store.delete_key(done)
        return [pickle.loads(content) for content in contents]

    def barrier(self) -> None:
        self.allgather(None)

    def split(self, color: int) -> World:
        from torch.distributed import PrefixStore

        members = [rank for rank, other in enumerate(self.allgather(color)) if other == color]
        store = PrefixStore(f"split/{self._calls}/{color}", self._store)
        return StoreWorld(members.index(self.rank), len(members), store)

    def _wait(self, keys: list[str]) -> list[bytes]:
        from torch.distributed import DistError

        try:
            return list(self._store.multi_get(keys))
        except DistError as error:
            peers = "rank 0" if len(keys) == 1 else f"{self.size} ranks"
            raise PeerTimeoutError(f"{peers} of this component: no answer: {error}") from error

    def _next_key(self) -> str:
        self._calls += 1
        return str(self._calls)

    def _read(self, key: str, keys: list[str], *, readers: int) -> bool:
        """Notes that this rank has the values; whether it was the last, and deleted them."""
        counter = f"{key}/readers"
        if self._store.add(counter, 1) < readers:
            return False
        for read in [*keys, counter]:
            self._store.delete_key(read)
        return True


def connect(
    bootstrap: str,
    *,
    rank: int,
    size: int,
    rendezvous: Path,
    timeout_s: float = 300,
    role: str = "",
) -> World:
    """Joins the ranks of this component.

    Args:
        bootstrap: "mpi"; "mpi_job", where other components are in the same world; or "files".
        rank: what the launcher says; with MPI the communicator decides.
        size: tasks the launcher started; a world of another size is an error.
        rendezvous: record that rank 0 writes; its name must be new for every start.
        timeout_s: how long a rank may be silent.
        role: of this component, which tells it from the others in the world of the job.

    Raises:
        LaunchError: MPI made worlds of the wrong size.
        PeerTimeoutError: rank 0 did not write the rendezvous record.
    """
    if bootstrap == "mpi":
        return MpiWorld.of_step(size)
    if bootstrap == "mpi_job":
        return MpiWorld.of_step(size, role)
    return (
        SoloWorld() if size == 1 else StoreWorld.join(rank, size, rendezvous, timeout_s=timeout_s)
    )


def wait_for_record(path: Path, *, timeout_s: float, peer: str) -> Any:  # noqa: ANN401
    """Waits for a peer's record.

    Raises:
        PeerTimeoutError: it did not appear within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while (record := read_json(path)) is None:
        if time.monotonic() > deadline:
            raise PeerTimeoutError(f"{peer} wrote no {path} within {timeout_s:.0f} s")
        time.sleep(_POLL_S)
    return record


def node_address() -> str:
    """An address of this node that the other nodes can reach; loopback where there is no other."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # asks the routing table; sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
