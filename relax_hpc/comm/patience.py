"""The limits of a rank of an engine that waits for the trainer."""

import time

import torch.distributed as dist

from relax_hpc.comm.orders import Order, abort_key

_LOOK_S = 0.1
"""Interval of looks whether somebody gave up."""
GIVEN_UP = "this update was given up"
"""The end of what a rank says that failed for another's sake."""


class Patience:
    """The wait of a rank for one order."""

    def __init__(self, order: Order, store: dist.Store) -> None:
        self.deadline = time.monotonic() + order.timeout_s
        self._key, self._store, self._next = abort_key(order.serial), store, 0.0

    def check(self) -> None:
        """Raises an error once there is nothing to wait for: it is late, or somebody gave up."""
        now = time.monotonic()
        if now > self.deadline:
            raise TimeoutError("the trainer sent nothing more")
        if now > self._next:
            self._next = now + _LOOK_S
            if self._store.check([self._key]):  # an error, too, if the trainer is dead
                raise TimeoutError(GIVEN_UP)
