"""Ranks that wait for rank 0, which waits for others: they hear from it, or would give up on it."""

import time
from typing import NamedTuple, TypeVar

from relax_hpc.comm.world import World

TURN_S = 30.0
"""The other ranks hear from rank 0 so often, while it waits for others."""
T = TypeVar("T")


class Waits(NamedTuple):
    """Rank 0's word that what the others wait for is not there yet."""


class Turns:
    """Rank 0's word to the others, who are in `heard` or come to it."""

    def __init__(self, world: World) -> None:
        self._world, self._told_at = world, time.monotonic()

    def tell(self) -> None:
        """Says that rank 0 waits if that was not said for long; call it as often as you like."""
        if time.monotonic() >= self._told_at + TURN_S:
            self._told_at = time.monotonic()
            self._world.bcast(Waits())


def heard(world: World, value: T) -> T:
    """Rank 0's `value`, on every rank, once there is one; collective."""
    told: T | Waits = Waits()
    while isinstance(told, Waits):
        told = world.bcast(value)
    return told
