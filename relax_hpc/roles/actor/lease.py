"""Passes a lease on shared GPUs between actor and engines.

Rank 0 gives the lease. The trainer holds it from the time a batch is complete and engines are idle
until the policy is updated. Then engines get that policy, and sample the next batch.
"""

import logging
import time

import torch

from relax_hpc.roles.training.duties import Turns, heard
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.trainer.training_engine import TrainingEngine
from relax_hpc.weights.same_gpu import Sleep

log = logging.getLogger(__name__)


class Lease:
    """The right to use the GPUs: always the trainer's, on GPUs that no engine uses.

    Every rank of the actor has one, and methods are collective.
    """

    def to_trainer(self, trainer: TrainingEngine) -> None:
        """Returns when the trainer may compute; immediately if it already may."""

    def to_engines(self, trainer: TrainingEngine) -> None:
        """Ends the trainer's right to compute until it has the lease again."""

    def close(self) -> None: ...


class SharedGpus(Lease):
    """The lease on GPUs that engines use, too."""

    def __init__(self, world: World, engines: Sleep | None, events: EventWriter) -> None:
        """Returns when engines sleep: those of an actor that died may hold the memory.

        Args:
            engines: on rank 0 only.
        """
        self._world, self._engines, self._events = world, engines, events
        self._turns = Turns(world)
        self._given_back = 0.0
        """GiB of this GPU that engines released when they last fell asleep."""
        with heartbeat.phase("lease", waits=True):
            self._take()

    def to_trainer(self, trainer: TrainingEngine) -> None:
        """Puts engines to sleep, and restores the trainer's GPU memory."""
        if not self._is_trainers:
            self._take()
            trainer.reclaim()

    def to_engines(self, trainer: TrainingEngine) -> None:
        """Releases most of the trainer's memory; engines may start, and wake once they get
        weights."""
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

    def _take(self) -> None:
        start, before = time.perf_counter(), free_gib() or 0.0
        if self._engines:
            self._engines.fall_asleep(on_wait=self._turns.tell)
            self._given_back = (free_gib() or 0.0) - before
            self._note("trainer", time.perf_counter() - start)
        heard(self._world, None)
        self._is_trainers = True

    def _doubt_room(self) -> None:
        """Warns if engines want more of the GPU than is free: they will crash and restart."""
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
    """Returns the free GiB of this process's GPU; None without a GPU."""
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else None
