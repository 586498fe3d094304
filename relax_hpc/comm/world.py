"""The ranks of one component, and the small objects they agree on.

Two ways in, one interface: MPI (Slurm starts the ranks, mpi4py joins them), or files (a record in
the run directory says where rank 0 listens, see `star`) for launchers without MPI. Tensors never go
this way: `torch_group` and `broadcast` carry them.
"""

import pickle
import sys
import time
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self

import numpy as np

from relax_hpc import heartbeat
from relax_hpc.comm.star import StarWorld
from relax_hpc.errors import LaunchError, PeerTimeoutError
from relax_hpc.run_secret import RunSecret

_MPI_PIECE = 1 << 30  # MPI counts bytes in an int
_ROLL_S = 10.0
"""Time that ranks have to answer when the roll is called."""


class World(Protocol):
    """Ranks that act together; every method is called by all of them in the same order."""

    rank: int
    size: int
    timeout_s: float
    """How long a rank may be silent, here and in a collective of torch."""

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
            world is of no use then.
    """

    def __init__(self, comm: Any, *, timeout_s: float = 300) -> None:  # noqa: ANN401
        """Takes a communicator; collective.

        Args:
            comm: of mpi4py.
            timeout_s: how long a rank may be silent.
        """
        self._comm, self.timeout_s = comm, timeout_s
        self._calls = comm.Dup()
        """Carries nothing but calls of the roll."""
        self.rank, self.size = comm.rank, comm.size

    @classmethod
    def of_step(
        cls, expected_size: int, role: str | None = None, *, timeout_s: float = 300
    ) -> Self:
        """COMM_WORLD of the step that Slurm started; of it, the ranks that give the same `role`."""
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
        """Waits asleep. MPI's own waiting spins, and a rank may wait minutes for a batch."""
        pause, deadline = 1e-4, time.monotonic() + self.timeout_s
        while not request.Test():
            if time.monotonic() > deadline or self._calls.Iprobe():
                self._fail()
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def _fail(self) -> NoReturn:
        """Calls the roll: who waits, too, hears that and answers with a call of its own."""
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
        names = ", ".join(map(str, sorted(missing)))
        raise PeerTimeoutError(
            f"rank{'s' if len(missing) > 1 else ''} {names} of the {self.size} of this component "
            f"said nothing for {self.timeout_s:g} s"
            if missing
            else f"all {self.size} ranks of this component wait, for different things"
        )

    def _heard(self) -> int:
        from mpi4py import MPI

        status = MPI.Status()
        self._calls.Recv(np.empty(0, np.uint8), status=status)
        return int(status.Get_source())


def abandon() -> None:
    """Lets this process end by itself after an error: MPI would wait for the other ranks, which may
    wait for this one."""
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
        return MpiWorld.of_step(size, timeout_s=timeout_s)
    if bootstrap == "mpi_job":
        return MpiWorld.of_step(size, role, timeout_s=timeout_s)
    if size == 1:
        return SoloWorld()
    key = secret.derive(f"world/{rendezvous.name}")  # what was said in another start is void
    return StarWorld.join(rank, size, rendezvous, key, timeout_s=timeout_s)
