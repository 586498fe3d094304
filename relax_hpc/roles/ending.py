"""Coordinates the end of a job that Slurm announces, through the run directory.

The first process to hear of it writes `control/ending-<attempt>.json` (`launch.requeue`); all
processes poll that file. Rollout publishes finished groups and keeps unfinished ones; the trainer
saves its last step and waits for the end. It starts no step that the job's time limit would cut
off. If the job is not requeued, the record says so, and all continue.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.roles.context import JobEnd
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.files import records
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.paths import RunPaths

if TYPE_CHECKING:
    from relax_hpc.trainer.checkpoints.saving import Saving
    from relax_hpc.trainer.training_engine import TrainingEngine

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
_POLL_S = 0.2
MARGIN_S = 30.0
"""Seconds for rollout to keep its groups, and for Slurm to react."""
_REMEMBERED = 100
_QUANTILE = 0.95


class Ending:
    """The announced end of one attempt, as one process sees it.

    Args:
        saves: record of this process's saves; the policy's by default.
    """

    def __init__(self, paths: RunPaths, attempt: str, saves: Path | None = None) -> None:
        self._saves, record = saves or paths.saves(attempt), paths.ending(attempt)
        self._read = records.follow(record, partial(read_json, record))
        critic = paths.critic_saves(attempt)
        self._read_critic = records.follow(critic, partial(read_json, critic))
        self._critic_save_s = 0.0
        self._is_near, self._looked = False, -LOOK_EVERY_S

    def is_near(self) -> bool:
        """Whether the job is about to end; polls once a second at most."""
        now = time.monotonic()
        if now - self._looked >= LOOK_EVERY_S:
            record, critic = self._read(), self._read_critic() or {}
            self._critic_save_s = float(critic.get("save_s", self._critic_save_s))
            self._is_near, self._looked = record is not None and "refused" not in record, now
        return self._is_near

    def critic_save_s(self) -> float:
        """Returns seconds that a save of the critic takes, as last reported; 0 without a critic."""
        return self._critic_save_s

    def will_save(self, save_s: float = 0.0) -> None:
        """Asks the end to wait for a save, as long as it can, and reports how long one takes."""
        write_json(self._saves, {"step": None, "save_s": save_s})

    def note_saved(self, step: int) -> None:
        """Reports that a step, or rollout's unfinished prompt groups, are on disk and nothing is
        left to wait for."""
        write_json(self._saves, {"step": step})

    def wait(self) -> None:
        """Waits for the end; returns if it does not come."""
        with heartbeat.phase("end of the job", waits=True):
            while self.is_near():
                time.sleep(_POLL_S)


class Admission:
    """Checks the time on rank 0, between steps and during waits for a batch.

    Args:
        save_times: returns the seconds of all saves so far.
        critic_save_s: returns the seconds of the critic's save of the same step.
    """

    def __init__(
        self,
        end: JobEnd,
        save_times: Callable[[], Sequence[float]],
        critic_save_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._end, self._save_times, self._critic_save_s = end, save_times, critic_save_s
        self._step_times = deque[float](maxlen=_REMEMBERED)
        self._work_times = deque[float](maxlen=_REMEMBERED)
        """Time of each step after its batch was complete, i.e. after the last check within it."""
        self._step, self._begun, self._looked = -1, 0.0, 0.0
        self._has_announced = False

    def consider(self, step: int) -> None:
        """Announces the end of the job, once, if there is no time to train and save the step after
        `step`. The first step after a start is always tried."""
        now = time.monotonic()
        if step != self._step:
            if self._step >= 0:
                self._step_times.append(now - self._begun)
                self._work_times.append(now - self._looked)
            self._step, self._begun = step, now
        self._looked = now
        if self._has_announced or not self._step_times:
            return
        step_s = high(self._step_times)
        save_s = max(high(self._save_times()), self._critic_save_s())
        after_s = max(save_s + MARGIN_S, self._end.ahead_s)
        # However long a batch was waited for, the work on it is still to come.
        needed_s = max(step_s - (now - self._begun), high(self._work_times)) + after_s
        left_s = self._end.compute_left_s()
        if left_s is None or left_s >= needed_s:
            return
        log.info(
            "%.0f s of the job are left, step %d needs another %.0f s, with %.0f s for its save "
            "and the end: ending before it",
            left_s, step + 1, needed_s - after_s, after_s,
        )  # fmt: skip
        self._has_announced = True
        self._end.announce()


def high(seconds: Sequence[float]) -> float:
    """Returns the 95th percentile, one of the values; 0 if there are none."""
    if not seconds:
        return 0.0
    return sorted(seconds)[math.ceil(_QUANTILE * len(seconds)) - 1]


class LastSave:
    """Called between steps, and during waits for a batch; collective.

    Args:
        ending: on rank 0, which decides for all; None on the other ranks.
        job_end: lets the policy's rank 0 end the job before a step that would not finish.
    """

    def __init__(
        self,
        world: World,
        trainer: "TrainingEngine",
        saves: "Saving[Any]",
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
        ending.note_saved(step)
        ending.wait()
        ending.will_save(high(self._saves.times))
        log.info("the job is not about to end any more: going on")

    def is_due(self) -> bool:
        """Rank 0: whether to interrupt a wait for a batch, and call this."""
        if self._admission:
            self._admission.consider(self._trainer.step)
        if self._ending is not None and self._num_told != len(self._saves.times):
            self._num_told = len(self._saves.times)
            self._ending.will_save(high(self._saves.times))
        return self._ending is not None and self._ending.is_near()

    def close(self) -> None:
        """Reports that no end has to wait any more: the very last step is on disk."""
        if self._ending:
            self._ending.note_saved(self._trainer.step)
