"""The ranks of one component, and the small objects they agree on.

Two ways in, one interface: MPI (Slurm starts the ranks, mpi4py joins them), or files (a record in
the run directory says where rank 0 listens, see `star`) for launchers without MPI. Tensors never go
this way: `torch_group` and `broadcast` carry them.
"""

import pickle
import time
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from relax_hpc.comm.star import StarWorld
from relax_hpc.errors import LaunchError
from relax_hpc.run_secret import RunSecret

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
        bootstrap: "mpi"; "mpi_job", where other components are in the same world; or "files".
        rank: what the launcher says; with MPI the communicator decides.
        size: tasks the launcher started; a world of another size is an error.
        rendezvous: record that rank 0 writes; its name must be new for every start.
        secret: of the run; without MPI, ranks that do not know it are not let in.
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
    if size == 1:
        return SoloWorld()
    key = secret.derive(f"world/{rendezvous.name}")  # what was said in another start is void
    return StarWorld.join(rank, size, rendezvous, key, timeout_s=timeout_s)
