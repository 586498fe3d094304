"""Trains a step again: the actor's loop, without engines and without saves."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from relax_hpc.bus.plan import PlanRecord, read_chain
from relax_hpc.bus.reader import Reader
from relax_hpc.config.run import RunConfig
from relax_hpc.roles.actor import loop
from relax_hpc.roles.actor.build import own_columns
from relax_hpc.roles.dealing.portions import Batch, Portion
from relax_hpc.roles.role import ModelRank
from relax_hpc.roles.training.build import RankStart, trainer_of
from relax_hpc.roles.training.duties import Duties, nothing
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.telemetry.timers import Timers

log = logging.getLogger(__name__)


class ReplayRank0(Duties[Portion]):
    """Hands out the planned batches, and logs the steps.

    Args:
        planned: the portions of all batches of the run, in order.
    """

    def __init__(
        self, config: RunConfig, reader: Reader, planned: Sequence[PlanRecord], events: EventWriter
    ) -> None:
        self._config, self._reader, self._events = config, reader, events
        self._planned = {(record.step, record.portion): record for record in planned}
        self._batch, self._step, self._portion = Batch(config, reader), 0, 0

    def next_task(self, step: int, timers: Timers) -> Portion:
        if step != self._step:
            self._batch, self._step, self._portion = Batch(self._config, self._reader), step, 0
        with timers("read"):
            dealt = self._batch.deal(self._planned[step, self._portion])
        self._portion += 1
        return dealt

    def end_step(self, step: int, fields: dict[str, Any], timers: Timers) -> None:
        fields = self._batch.describe(step) | fields | timers.seconds
        self._events.emit("step", step=step, **fields)
        log.info("step %d | loss %g | grad norm %g", step, fields["loss"], fields["grad_norm"])


def main(
    rank: ModelRank[RunConfig], run_dir: Path, last_step: int, checkpoint: Path | None
) -> None:
    """Trains the steps of a run again, from a checkpoint or its model to `last_step`."""
    config, world = rank.config, rank.world
    start = RankStart(rank)
    trainer = start.build(partial(trainer_of, config, world))
    columns = own_columns(config, trainer, None)
    if checkpoint is not None:
        trainer.load(checkpoint)
    bus = RunPaths(run_dir).bus
    reader, duties = Reader(bus), Duties[Portion]()
    if world.rank == 0:
        duties = ReplayRank0(config, reader, read_chain(bus).steps, rank.events)
    until = config.schedule.model_copy(update={"num_steps": last_step})
    config = config.model_copy(update={"schedule": until})
    loop.run(config, world, trainer, reader, duties, loop.Stages(nothing, columns))
    start.end()
