"""Saves a run when a save is due: checkpoints beside training, and Hugging Face exports."""

import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from relax_hpc.bus.plan import PlanPosition, gone_of_first_step
from relax_hpc.bus.tools.garbage import is_deletable
from relax_hpc.config.model import SavingConfig
from relax_hpc.errors import CheckpointError, ConfigError
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.files.storage import exists
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.trainer.checkpoints.store import Checkpoint, Checkpoints, P, Position, Saved
from relax_hpc.trainer.models import hf_folder
from relax_hpc.trainer.training_engine import TrainingEngine

log = logging.getLogger(__name__)


def save_hf(
    folder: Path,
    tensors: Iterator[tuple[str, Tensor]],
    source: Path,
    *,
    write: bool,
    shard_bytes: int = hf_folder.SHARD_BYTES,
) -> None:
    """Writes the stream as a folder that loads like `source`. Every rank iterates to the end.

    No rank waits for the writing one: the folder exists when that one returns.

    Args:
        folder: appears complete, by a rename; an existing one is replaced.
        source: of config.json, the tokenizer and other small files.
        shard_bytes: of the tensors in a file; the writing rank holds one in host memory.
    """
    if write:
        hf_folder.write(folder, tensors, source, shard_bytes=shard_bytes)
        return
    for _ in tensors:
        pass


P_co = TypeVar("P_co", bound=Position, covariant=True)


def _nothing() -> None: ...


def checkpoints_of(
    config: SavingConfig,
    paths: RunPaths,
    world: World,
    position_type: Callable[..., P],
    *,
    timeout_s: float,
    is_valid: Callable[[P], bool] = lambda _: True,
    lacks: Callable[[P], str] = lambda _: "",
    best: Callable[[Collection[int]], Collection[int]] | None = None,
    folder: Path | None = None,
) -> Checkpoints[P]:
    """Makes the checkpoints of a run, kept as its settings say.

    Args:
        timeout_s: like `is_valid`, `lacks` and `best`, as in `Checkpoints`.
        folder: of them; the policy's by default.
    """
    return Checkpoints(
        folder or paths.checkpoints,
        world,
        position_type,
        keep=config.keep_checkpoints,
        keep_every=config.keep_every,
        best=best,
        beside_training=True,
        timeout_s=timeout_s,
        is_valid=is_valid,
        lacks=lacks,
    )


def resume(
    checkpoints: Checkpoints[P],
    trainer: TrainingEngine,
    events: EventWriter,
    *,
    is_critic: bool = False,
) -> Checkpoint[P] | None:
    """Loads the newest complete checkpoint, if any, and logs incomplete ones.

    Args:
        is_critic: whether this is not the policy, whose event records the progress of the run.
    """
    resumed = checkpoints.resume(
        trainer, lambda step, why: events.emit("checkpoint_torn", step=step, message=why)
    )
    if resumed and is_critic:
        events.emit("critic_resume", step=resumed.step)
    elif resumed:
        events.emit("resume", step=resumed.step)
    return resumed


def check_begin(paths: RunPaths) -> None:
    """Checks that a run without a checkpoint can begin with step 1, maybe again.

    Raises:
        ConfigError: a checkpoint covered shards that are deleted, and all checkpoints are gone.
    """
    if gone := gone_of_first_step(paths.bus):
        raise ConfigError(
            f"{paths.checkpoints}: has no checkpoint any more, and step 1 cannot be trained again: "
            f"{gone} was deleted once a checkpoint had passed it; restore the newest step_... "
            "folder there, or submit a run of another name"
        )


def lack_of(paths: RunPaths, position: PlanPosition) -> str:
    """Returns which shards a run may lack if it continues from there; "" if none."""
    step = position.step + 1
    if not is_deletable(paths.bus, step):
        return ""
    return f"shards of step {step} may have been deleted since; bus.keep_steps keeps them"


class SavingRank0(Protocol[P_co]):
    """Rank 0's part in saving a run."""

    @property
    def position(self) -> P_co:
        """Returns the position in the data after the step just trained."""
        ...

    def check_fenced(self) -> None:
        """Raises if another trainer took over; called from another thread."""
        ...

    def release(self) -> None:
        """Releases data that not even the oldest checkpoint needs; called when one is complete."""
        ...


class Saving(Generic[P]):
    """Saves if a save is due; every rank calls it after every step."""

    def __init__(
        self,
        config: SavingConfig,
        paths: RunPaths,
        world: World,
        trainer: TrainingEngine,
        checkpoints: Checkpoints[P],
        rank0: SavingRank0[P] | None,
        events: EventWriter,
        *,
        num_steps: int,
        source: Path,
    ) -> None:
        """Lets the trainer allocate memory for saves, and begins nothing else yet.

        Args:
            rank0: None on the other ranks.
            source: Hugging Face folder with config.json and tokenizer for exports.
        """
        self._config, self._paths, self._world = config, paths, world
        self._trainer, self._checkpoints, self._rank0 = trainer, checkpoints, rank0
        self._events, self._num_steps, self._source = events, num_steps, source
        self._is_due = False
        self._begun = trainer.step
        """Step of the save begun last, or of the checkpoint resumed from; -1: it failed."""
        self.times: list[float] = []
        """Seconds of each save, until it was on disk."""
        trainer.expect_saves()

    def __call__(self) -> None:
        """Begins a checkpoint if one is due, and ends finished ones; waits for the run's last one.

        A save is put off while updates are skipped: if the run gets stuck, a restart begins where
        it still learned. Only the run's last step is saved all the same.

        Raises:
            CheckpointError: the run's last checkpoint, or several in a row, could not be saved.
            FencedError: another trainer took over.
        """
        step, config = self._trainer.step, self._config
        last = step == self._num_steps
        done = self._checkpoints.poll()
        self._is_due |= step % config.save_every == 0
        if last or (self._is_due and self._trainer.skip is None):
            done += self._begin()
        if last:
            done += self._checkpoints.wait()
        for saved in done:
            self._note(saved)
        if last and done[-1].failure:
            raise CheckpointError(
                f"the run's last checkpoint could not be saved: {done[-1].failure}; a restart goes "
                "on from the one before"
            )
        if config.save_hf_every and step % config.save_hf_every == 0:
            self._save_hf(step)

    def make_up(self) -> None:
        """Makes the export of the resumed step if it is due and missing: the process that exported
        it was killed. Collective."""
        step, every = self._trainer.step, self._config.save_hf_every
        if not every or not step or step % every:
            return
        if not self._world.bcast(exists(self._paths.hf(step))):
            self._save_hf(step)

    def now(self) -> bool:
        """Saves the last step, unless that was done, and waits for it. Collective.

        A step whose update was skipped is not saved.

        Returns:
            Whether it is on disk.
        """
        step = self._trainer.step
        for saved in self._checkpoints.wait():  # one of this step may fail
            self._note(saved)
        if step != self._begun and self._trainer.skip is None:
            for saved in [*self._begin(), *self._checkpoints.wait()]:
                self._note(saved)
        return self._begun == step

    def _begin(self) -> list[Saved]:
        self._is_due, self._begun = False, self._trainer.step
        with heartbeat.phase("checkpoint"):
            return self._checkpoints.save(
                self._trainer,
                self._rank0.position if self._rank0 else None,
                self._rank0.check_fenced if self._rank0 else _nothing,
            )

    def _note(self, saved: Saved) -> None:
        if saved.failure and saved.step == self._begun:
            self._begun = -1
        if self._rank0 is None:
            return
        if saved.failure:
            self._events.emit("checkpoint_failed", step=saved.step, message=saved.failure)
            return
        self._rank0.release()
        self.times.append(saved.wait_s + saved.background_s)
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
                self._trainer.stream_weights(),
                self._source,
                write=self._rank0 is not None,
            )
        if self._rank0:
            seconds = timers.seconds["time/save_hf"]
            self._events.emit("export", step=step, path=str(folder), seconds=seconds)
            log.info("the model of step %d is in %s", step, folder)
