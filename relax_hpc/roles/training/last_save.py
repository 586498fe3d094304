"""The save that a trainer makes when its job is about to end."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from relax_hpc.comm.world import World
from relax_hpc.roles.ending import Ending
from relax_hpc.roles.training.admission import Admission, JobEnd, high

if TYPE_CHECKING:
    from relax_hpc.engines.training_engine import TrainingEngine

log = logging.getLogger(__name__)


class Saves(Protocol):
    @property
    def times(self) -> Sequence[float]:
        """Seconds that each save so far took, from its begin until it was on disk."""
        ...

    def now(self) -> bool:
        """Saves the step that was trained last, unless that was done; whether it is on disk."""
        ...


class LastSave:
    """Called between steps, and while a batch is waited for; collective.

    Args:
        ending: rank 0's, who decides for all; None on the other ranks.
        job_end: has rank 0 of the policy end the job before a step that would not be finished.
    """

    def __init__(
        self,
        world: World,
        trainer: "TrainingEngine",
        saves: Saves,
        ending: Ending | None,
        job_end: JobEnd | None = None,
    ) -> None:
        self._world, self._trainer, self._saves, self._ending = world, trainer, saves, ending
        self._admission: Admission | None = None
        self._num_told = 0
        if ending and job_end:
            self._admission = Admission(job_end, lambda: saves.times, ending.critic_save_s)
        if ending:
            ending.will_save()

    def __call__(self) -> None:
        """Saves if the end is near, and waits for it: no further step would be kept."""
        if not self._world.bcast(self.is_due()):
            return
        is_saved, ending = self._saves.now(), self._ending
        if ending is None:
            return
        step = self._trainer.step
        if is_saved:
            log.info("the job is about to end: step %d is saved", step)
        else:
            log.error("the job is about to end, and step %d could not be saved", step)
        ending.saved(step)
        ending.wait()
        ending.will_save(high(self._saves.times))
        log.info("the job is not about to end any more: going on")

    def is_due(self) -> bool:
        """Rank 0's: whether a wait for a batch is to be broken off, and this to be called."""
        if self._admission:
            self._admission.consider(self._trainer.step)
        if self._ending is not None and self._num_told != len(self._saves.times):
            self._num_told = len(self._saves.times)
            self._ending.will_save(high(self._saves.times))
        return self._ending is not None and self._ending.is_near()

    def close(self) -> None:
        """Says that no end has to wait any more: the last step of all is on disk."""
        if self._ending:
            self._ending.saved(self._trainer.step)
