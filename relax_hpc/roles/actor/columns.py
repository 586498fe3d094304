"""Columns that the actor itself adds to rows, right before it trains on them."""

from collections.abc import Sequence
from typing import Protocol

from relax_hpc.schema import Trajectory


class ColumnSource(Protocol):
    """Adds a column to rows; every rank of the actor has one, and its methods are collective."""

    @property
    def name(self) -> str:
        """Of what it does, in the times of a step."""
        ...

    def fill(
        self, trajectories: Sequence[Trajectory], micro_batches: Sequence[Sequence[int]]
    ) -> list[Trajectory]:
        """The rows with the column; `micro_batches` index `trajectories`."""
        ...

    def end_step(self, step: int) -> None:
        """Called when the policy of `step` is published, and before a checkpoint of it is saved."""
        ...
