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
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from relax_hpc.errors import LaunchError, PeerTimeoutError
from relax_hpc.records import read_json, write_json

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_POLL_S = 0.05


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


class SoloWorld:
    """A world of one: nothing to agree on."""

    rank, size = 0, 1

    def bcast(self, value: Any) -> Any:  # noqa: ANN401
        return value

    def allgather(self, value: Any) -> list[Any]:  # noqa: ANN401
        return [value]

    def barrier(self) -> None: ...


class MpiWorld:
    """COMM_WORLD of the step that Slurm started."""

    def __init__(self, expected_size: int) -> None:
        from mpi4py import MPI  # initialises MPI: only ranks of an MPI step may import it

        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        if self.size != expected_size:
            raise LaunchError(
                f"MPI sees {self.size} ranks where the launcher started {expected_size}: "
                "resources.mpi does not fit this MPI library; "
                "use pmix for Open MPI, pmi2 for MPICH (srun --mpi=list)"
            )

    def bcast(self, value: Any) -> Any:  # noqa: ANN401
        content = pickle.dumps(value) if self.rank == 0 else b""
        size = np.array([len(content)], dtype=np.int64)
        self._wait(self._comm.Ibcast(size, root=0))
        buffer = bytearray(content) if self.rank == 0 else bytearray(int(size[0]))
        self._wait(self._comm.Ibcast(buffer, root=0))
        return value if self.rank == 0 else pickle.loads(buffer)  # written by our own rank 0

    def allgather(self, value: Any) -> list[Any]:  # noqa: ANN401
        self.barrier()
        return self._comm.allgather(value)

    def barrier(self) -> None:
        self._wait(self._comm.Ibarrier())

    @staticmethod
    def _wait(request: Any) -> None:  # noqa: ANN401
        """Waits asleep. MPI's own waiting spins, and a rank may wait minutes for a batch."""
        pause = 1e-4
        while not request.Test():
            time.sleep(pause)
            pause = min(2 * pause, 0.01)


class StoreWorld:
    """Ranks joined through a TCP store of rank 0, found by a record on the shared file system."""

    def __init__(self, rank: int, size: int, rendezvous: Path, *, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._timeout_s, self._calls = timeout_s, 0
        self._store: Any = self._connect(rendezvous)  # its stub allows str values only

    def _connect(self, rendezvous: Path) -> "TCPStore":
        from torch.distributed import TCPStore

        timeout = timedelta(seconds=self._timeout_s)
        if self.rank == 0:
            host = node_address()
            store = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
            write_json(rendezvous, {"host": host, "port": store.port})
            return store
        record = wait_for_record(rendezvous, timeout_s=self._timeout_s, peer="rank 0")
        return TCPStore(record["host"], record["port"], None, False, timeout)

    def bcast(self, value: Any) -> Any:  # noqa: ANN401
        self._calls += 1
        key = f"bcast/{self._calls}"
        if self.rank == 0:
            self._store.set(key, pickle.dumps(value))
            return value
        return pickle.loads(self._store.get(key))  # written by our own rank 0

    def allgather(self, value: Any) -> list[Any]:  # noqa: ANN401
        self._calls += 1
        self._store.set(f"gather/{self._calls}/{self.rank}", pickle.dumps(value))
        keys = [f"gather/{self._calls}/{rank}" for rank in range(self.size)]
        values = [pickle.loads(self._store.get(key)) for key in keys]
        return values

    def barrier(self) -> None:
        self.allgather(None)


def connect(
    bootstrap: str, *, rank: int, size: int, rendezvous: Path, timeout_s: float = 300
) -> World:
    """Joins the ranks of this component.

    Args:
        bootstrap: "mpi" or "files".
        rank: what the launcher says; with MPI the communicator decides.
        size: tasks the launcher started; a world of another size is an error.
        rendezvous: record that rank 0 writes; its name must be new for every start.

    Raises:
        LaunchError: MPI made worlds of the wrong size.
        PeerTimeoutError: rank 0 did not write the rendezvous record.
    """
    if bootstrap == "mpi":
        return MpiWorld(size)
    return SoloWorld() if size == 1 else StoreWorld(rank, size, rendezvous, timeout_s=timeout_s)


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
