"""Actor and engines on the same GPUs: one uses them, then the other.

The lead leads. A turn of the trainer begins once a batch is whole, when engines have nothing to do,
and ends with the update of the policy; then engines are given it, and sample the next batch.
"""

import logging
import time
from typing import Protocol

import torch

from relax_hpc.comm.world import World
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.weights.sleep import NOTICE_S

log = logging.getLogger(__name__)


class Borrower(Protocol):
    """The rank's trainer, as far as its memory goes."""

    def lend(self) -> None:
        """Gives up what it can make anew."""
        ...

    def reclaim(self) -> None: ...


class Engines(Protocol):
    """All of them, as rank 0 leads them."""

    def fall_asleep(self, *, notice_s: float = 0.0) -> None: ...
    def wake(self) -> None: ...


class Turns:
    """Of one actor rank; methods are collective."""

    def __init__(self, world: World, engines: Engines | None, events: EventWriter) -> None:
        """`engines` are rank 0's, nobody else's."""
        self._world, self._engines, self._events = world, engines, events
        self._is_trainers = False

    def begin(self) -> None:
        """Before there is a trainer: engines of an actor that died may have the memory."""
        self._take(notice_s=NOTICE_S)

    def to_trainer(self, trainer: Borrower) -> None:
        """Engines sleep, and the trainer has what it needs; nothing to do if it has it already."""
        if not self._is_trainers:
            self._take()
            trainer.reclaim()

    def to_engines(self, trainer: Borrower) -> None:
        """The trainer keeps little; engines may start, and wake once they are given weights."""
        trainer.lend()
        self._world.barrier()
        self._is_trainers = False
        if self._engines:
            self._engines.wake()
            self._note("engines", 0.0)

    def _take(self, *, notice_s: float = 0.0) -> None:
        start = time.perf_counter()
        if self._engines:
            self._engines.fall_asleep(notice_s=notice_s)
            self._note("trainer", time.perf_counter() - start)
        self._world.barrier()
        self._is_trainers = True

    def _note(self, holder: str, seconds: float) -> None:
        free = torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else None
        self._events.emit("turn", holder=holder, seconds=round(seconds, 4), free_gib=free)


class OwnGpus:
    """Of an actor that shares them with nobody."""

    def to_trainer(self, trainer: Borrower) -> None:
        """It is always the trainer's turn."""

    def to_engines(self, trainer: Borrower) -> None:
        """Engines have GPUs of their own."""


OWN_GPUS = OwnGpus()
