"""When a run is saved: checkpoints beside training, and the model for others to load."""

import logging
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, Protocol

from torch import Tensor

from relax_hpc.checkpoints.export import save_hf
from relax_hpc.checkpoints.pending import Saved
from relax_hpc.checkpoints.store import Checkpoint, Checkpoints, P, Saveable
from relax_hpc.comm.world import World
from relax_hpc.config.run import JobConfig
from relax_hpc.errors import CheckpointError
from relax_hpc.paths import RunPaths
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.telemetry.timers import Timers

log = logging.getLogger(__name__)


def _nothing() -> None: ...


def checkpoints_of(
    config: JobConfig,
    paths: RunPaths,
    world: World,
    position_type: Callable[..., P],
    is_valid: Callable[[P], bool] = lambda _: True,
) -> Checkpoints[P]:
    """Those of a run, as it is configured."""
    actor = config.actor
    return Checkpoints(
        paths.checkpoints,
        world,
        position_type,
        keep=actor.keep_checkpoints,
        keep_every=actor.keep_every,
        beside_training=actor.async_save,
        timeout_s=config.launch.peer_timeout_s,
        is_valid=is_valid,
    )


def resume(
    checkpoints: Checkpoints[P], trainer: Saveable, events: EventWriter
) -> Checkpoint[P] | None:
    """Loads the newest whole checkpoint, if there is any, and notes which ones were not whole."""
    resumed = checkpoints.resume(
        trainer, lambda step, why: events.emit("checkpoint_torn", step=step, message=why)
    )
    if resumed:
        events.emit("resume", step=resumed.step)
    return resumed


class Trainer(Saveable, Protocol):
    @property
    def skip(self) -> object | None:
        """Why the last update was not done."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]: ...


class Lead(NamedTuple, Generic[P]):
    """What only rank 0 knows."""

    position: Callable[[], P]
    """Where the step that was just trained ends."""
    check_fenced: Callable[[], None] = _nothing
    """Raises if another trainer took over; called from another thread."""
    covered: Callable[[], None] = _nothing
    """A checkpoint is complete: what not even the oldest one needs can go."""


class Saving(Generic[P]):
    """Called by every rank after every step, it saves when it is time to."""

    def __init__(
        self,
        config: JobConfig,
        paths: RunPaths,
        world: World,
        trainer: Trainer,
        checkpoints: Checkpoints[P],
        lead: Lead[P] | None,
        events: EventWriter,
    ) -> None:
        self._config, self._paths, self._world = config, paths, world
        self._trainer, self._checkpoints, self._lead = trainer, checkpoints, lead
        self._events = events
        self._is_due = False

    def __call__(self) -> None:
        """Begins a checkpoint if one is due, ends those that are done; the last one it waits for.

        After an update that was skipped it waits for one that was not: if the run gets stuck, a
        restart begins where it still learned. Only the run's last step is saved all the same.

        Raises:
            CheckpointError: the run's last checkpoint, or several in a row, could not be saved.
            FencedError: another trainer took over.
        """
        step, actor = self._trainer.step, self._config.actor
        last = step == self._config.num_steps
        done = self._checkpoints.poll()
        self._is_due |= step % actor.save_every == 0
        if last or (self._is_due and self._trainer.skip is None):
            self._is_due = False
            done += self._checkpoints.save(
                self._trainer,
                self._lead.position() if self._lead else None,
                self._lead.check_fenced if self._lead else _nothing,
            )
        if last:
            done += self._checkpoints.wait()
        for saved in done:
            self._note(saved)
        if last and done[-1].failure:
            raise CheckpointError(
                f"the run's last checkpoint could not be saved: {done[-1].failure}; a restart goes "
                "on from the one before"
            )
        if actor.save_hf_every and step % actor.save_hf_every == 0:
            self._save_hf(step)

    def _note(self, saved: Saved) -> None:
        if self._lead is None:
            return
        if saved.failure:
            self._events.emit("checkpoint_failed", step=saved.step, message=saved.failure)
            return
        self._lead.covered()
        self._events.emit(
            "checkpoint",
            step=saved.step,
            wait_s=saved.wait_s,
            background_s=saved.background_s,
            bytes=saved.num_bytes,
        )
        log.info(
            "checkpoint of step %d: %.2f GB; training waited %.1f s, it was complete after %.1f s",
            saved.step, saved.num_bytes / 1e9, saved.wait_s, saved.background_s,
        )  # fmt: skip

    def _save_hf(self, step: int) -> None:
        timers, folder = Timers(), self._paths.hf(step)
        with timers("save_hf"):
            save_hf(
                folder,
                self._trainer.named_weights(),
                self._config.model.path,
                write=self._lead is not None,
            )
        if self._lead:
            seconds = timers.seconds["time/save_hf"]
            self._events.emit("export", step=step, path=str(folder), seconds=seconds)
            log.info("the model of step %d is in %s", step, folder)
