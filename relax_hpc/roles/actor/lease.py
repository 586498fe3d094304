"""Actor and engines on the same GPUs: a lease goes from one to the other.

Rank 0 gives it. The trainer has it from when a batch is whole, and engines have nothing to do, to
the update of the policy; then engines are given that policy, and sample the next batch.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch

from relax_hpc import heartbeat
from relax_hpc.comm.world import World
from relax_hpc.engines.training_engine import TrainingEngine
from relax_hpc.roles.turns import Turns, heard
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.weights.sleep import NOTICE_S

log = logging.getLogger(__name__)


class Engines(Protocol):
    """All of them, as rank 0 sees to them."""

    def fall_asleep(self, *, notice_s: float = 0.0, on_wait: Callable[[], None] = ...) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class Lease(Protocol):
    """The right to use the GPUs; every rank of the actor has one, and methods are collective."""

    def to_trainer(self, trainer: TrainingEngine) -> None:
        """Returns when the trainer may compute; nothing to do if it may already."""
        ...

    def to_engines(self, trainer: TrainingEngine) -> None:
        """The trainer does not compute until it has the lease again."""
        ...

    def close(self) -> None: ...


class OwnGpus:
    """The lease on GPUs that nobody else uses: there is nothing to do."""

    def to_trainer(self, trainer: TrainingEngine) -> None: ...
    def to_engines(self, trainer: TrainingEngine) -> None: ...
    def close(self) -> None: ...


class SharedGpus:
    """The lease on GPUs that engines use, too."""

    def __init__(self, world: World, engines: Engines | None, events: EventWriter) -> None:
        """Returns when engines sleep: those of an actor that died may have the memory.

        Args:
            engines: rank 0's, nobody else's.
        """
        self._world, self._engines, self._events = world, engines, events
        self._turns = Turns(world)
        self._given_back = 0.0
        """GiB of this GPU that engines released when they last fell asleep."""
        with heartbeat.phase("lease", waits=True):
            self._take(notice_s=NOTICE_S)

    def to_trainer(self, trainer: TrainingEngine) -> None:
        """Engines sleep, and the trainer takes back what it lent."""
        if not self._is_trainers:
            self._take()
            trainer.reclaim()

    def to_engines(self, trainer: TrainingEngine) -> None:
        """The trainer keeps little; engines may start, and wake once they are given weights."""
        trainer.lend()
        self._world.barrier()
        self._is_trainers = False
        if self._engines:
            self._doubt_room()
            self._engines.wake()
            self._note("engines", 0.0)

    def close(self) -> None:
        if self._engines:
            self._engines.close()

    def _take(self, *, notice_s: float = 0.0) -> None:
        start, before = time.perf_counter(), free_gib() or 0.0
        if self._engines:
            self._engines.fall_asleep(notice_s=notice_s, on_wait=self._turns.tell)
            self._given_back = (free_gib() or 0.0) - before
            self._note("trainer", time.perf_counter() - start)
        heard(self._world, None)
        self._is_trainers = True

    def _doubt_room(self) -> None:
        """Says why engines will end that want more of the GPU than there is; they start again."""
        free = free_gib()
        if free is not None and free < self._given_back:
            log.warning(
                "engines gave back %.1f GiB of this GPU, and the trainer leaves %.1f of it: they "
                "will fail to wake, and start again with a smaller cache; lower their "
                "args.mem_fraction_static, or raise actor.optimizer.offload",
                self._given_back, free,
            )  # fmt: skip

    def _note(self, holder: str, seconds: float) -> None:
        self._events.emit("lease", holder=holder, seconds=round(seconds, 4), free_gib=free_gib())


def free_gib() -> float | None:
    """GiB of this process's GPU that nobody has; None where it has no GPU."""
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else None
