"""The reference policy inside the actor: its weights and the policy's alternate in one model."""

import logging
from collections.abc import Sequence
from pathlib import Path

from relax_hpc.engines.training_engine import TrainingEngine
from relax_hpc.schema import Trajectory
from relax_hpc.telemetry.events import EventWriter

log = logging.getLogger(__name__)

_NAME = "reference"
"""Name of the weights, in the engine and in checkpoints."""


class Reference:
    """Adds the column `ref_logprobs` to rows; every rank has one, and its methods are collective.

    Args:
        trainer: holds the policy before the first step still.
        path: Hugging Face folder of the reference, of the same shape; None takes what the trainer
            holds.
        refresh_every: steps between renewals; 0 never.
        events: rank 0's.

    Raises:
        ConfigError: `path` is not the trainer's model with other numbers.
    """

    name = _NAME
    """Name of its work, in the times of a step."""

    def __init__(
        self,
        trainer: TrainingEngine,
        path: Path | None = None,
        *,
        refresh_every: int = 0,
        events: EventWriter | None = None,
    ) -> None:
        self._trainer, self._refresh_every, self._events = trainer, refresh_every, events
        trainer.keep(_NAME, path)

    def fill(
        self, trajectories: Sequence[Trajectory], micro_batches: Sequence[Sequence[int]]
    ) -> list[Trajectory]:
        """The rows with the column; `micro_batches` index `trajectories`."""
        found = self._trainer.kept_logprobs(_NAME, trajectories, micro_batches)
        return [
            trajectory.with_columns(ref_logprobs=logprobs)
            for trajectory, logprobs in zip(trajectories, found, strict=True)
        ]

    def end_step(self, step: int) -> None:
        """The policy of `step` becomes the reference, if it is time to.

        Called when that is published, and before a checkpoint of it is saved, which then holds it.
        """
        if self._refresh_every and step % self._refresh_every == 0:
            self._trainer.keep(_NAME, lasting=True)
            if self._events:
                self._events.emit("reference", step=step)
                log.info("policy %d is the reference from now on", step)
