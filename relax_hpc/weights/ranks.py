"""The ranks of the trainer in a publication: rank 0 says what is to be done, and all do it."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from relax_hpc.comm.world import World
from relax_hpc.errors import SnapshotError
from relax_hpc.weights.snapshot import Snapshot, SnapshotWriter


class Rest(NamedTuple):
    """An order to leave the weights where they are."""


class Serve(NamedTuple):
    """An order to serve the engines of one way."""

    way: str
    skipped: tuple[int, ...] = ()
    """Buckets that are left out."""


class Write(NamedTuple):
    """An order to write a snapshot."""

    name: str


class WeightGiver(Protocol):
    """A rank other than 0, which gives weights in one way."""

    def publish(
        self,
        version: int,
        tensors: Iterator[tuple[str, Tensor]],
        skipped: Collection[int] = (),
    ) -> None: ...


class TrainerRanks:
    """A rank among the others. Rank 0 says one thing per publication; the others `publish`."""

    def __init__(
        self, world: World, snapshots: SnapshotWriter, others: Mapping[str, WeightGiver]
    ) -> None:
        """Every rank makes one.

        Args:
            world: the ranks of the trainer.
            snapshots: this rank's part of the writing.
            others: this rank's part in every way that rank 0 may serve; unused on rank 0.
        """
        self._world, self._snapshots, self._others = world, snapshots, others

    def publish(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Does what rank 0 says."""
        match self._world.bcast(None):
            case Serve(way, skipped):
                self._others[way].publish(version, tensors, skipped)
            case Write(name):
                with suppress(SnapshotError):  # rank 0 says so
                    self._snapshots.write(name, tensors)

    def tell(self, task: Rest | Serve) -> None:
        """Says what the others shall do."""
        self._world.bcast(task)

    def write_snapshot(
        self, version: int, tensors: Iterator[tuple[str, Tensor]], *, in_use: Collection[Path]
    ) -> Snapshot:
        """Tells them to write a snapshot, and writes it with them.

        Args:
            version: of the policy.
            tensors: rank 0's stream of the weights.
            in_use: snapshots that engines are loading.

        Raises:
            SnapshotError: it could not be written; nothing is left of it.
        """
        try:
            name = self._snapshots.begin(version, in_use=in_use)
        except SnapshotError:
            self.tell(Rest())
            raise
        self._world.bcast(Write(name))
        try:
            return self._snapshots.finish(name, self._snapshots.write(name, tensors))
        except SnapshotError:
            self._snapshots.discard(name)
            raise
