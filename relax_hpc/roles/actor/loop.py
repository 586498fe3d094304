"""Runs the actor: trains on batches in order, on each portion as soon as it is there."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from relax_hpc.algorithms.composition import Objective, objective_of
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.staleness import mask_over_age
from relax_hpc.config.actor import columns_by_teacher
from relax_hpc.config.run import RunConfig
from relax_hpc.roles.actor.lease import Lease
from relax_hpc.roles.dealing.portions import Portion, RankPortion, share_of
from relax_hpc.roles.dealing.sight import sight_of
from relax_hpc.roles.teacher.routing import of_its_teacher
from relax_hpc.roles.training.duties import Duties, heard, nothing, stop_or_go_on
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.schema import Trajectory
from relax_hpc.trainer.training_engine import TrainingEngine
from relax_hpc.weights.transport import TrainerRanks

log = logging.getLogger(__name__)

_NAME = "reference"
"""Name of the weights, in the engine and in checkpoints."""


class Reference:
    """Adds the column `ref_logprobs` to rows; every rank has one, and its methods are collective.

    Args:
        trainer: still holds the policy before the first step.
        path: Hugging Face folder of the reference, of the same shape; None uses the trainer's
            current weights.
        refresh_every: steps between renewals; 0 never.
        events: of rank 0.

    Raises:
        ConfigError: `path` is not the trainer's model with other numbers.
    """

    name = _NAME
    """Name of its phase in the times of a step."""

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
        """Returns the rows with the column; `micro_batches` index `trajectories`."""
        found = self._trainer.forward_kept_logprobs(_NAME, trajectories, micro_batches)
        return [
            trajectory.with_columns(ref_logprobs=logprobs)
            for trajectory, logprobs in zip(trajectories, found, strict=True)
        ]

    def end_step(self, step: int) -> None:
        """Makes the policy of `step` the reference, if a renewal is due.

        Called after that policy is published, and before it is saved, so the checkpoint holds it.
        """
        if self._refresh_every and step % self._refresh_every == 0:
            self._trainer.keep(_NAME, lasting=True)
            if self._events:
                self._events.emit("reference", step=step)
                log.info("policy %d is the reference from now on", step)


class Stages(NamedTuple):
    """The work around steps that differs between runs."""

    save: Callable[[], None]
    """Called after every step; saves if a save is due."""
    columns: Sequence[Reference] = ()
    """Parts that add columns to rows, in this order."""
    checks: Sequence[Callable[[], None]] = ()
    """Called when a batch's gradient is complete, before it is applied."""
    lease: Lease = Lease()
    stop: Callable[[], None] = nothing
    """Called before every step, and during waits for a batch; collective."""


def run(
    config: RunConfig,
    world: World,
    trainer: TrainingEngine,
    reader: Reader,
    duties: Duties[Portion],
    stages: Stages,
) -> None:
    """Trains until `num_steps`.

    Rank 0 decides which rank trains on which rows. One rank of each data-parallel replica reads
    them for the others. The order matters: publish, save, and only then release, which `save` does
    once a checkpoint is complete. A shard is deleted only when no resume can need it, so a
    restarted actor finds its next batches.
    """
    batches = _Batches(config, world, trainer, reader, duties, stages.stop)
    objective = objective_in(config)
    stages.lease.to_engines(trainer)
    publish(world, trainer, duties)
    while trainer.step < config.schedule.num_steps:
        stages.stop()
        step = trainer.step + 1
        timers = Timers(step)
        for rows, share, last in batches.portions(step, timers):
            with timers("lease", waits=True):
                stages.lease.to_trainer(trainer)
            for source in stages.columns:
                with timers(source.name):
                    rows = source.fill(rows, share.micro_batches)
            if step <= config.steps_of_critic_alone:
                continue
            with timers.phase("train"):
                trainer.accumulate(
                    rows, share.micro_batches, objective, last=last, mini_batches=share.mini_batches
                )
        for check in stages.checks:
            check()
        with timers.phase("train"):
            stats = _update(trainer, learns=step > config.steps_of_critic_alone)
        stop_or_go_on(duties, step, trainer.skip)
        stages.lease.to_engines(trainer)
        with timers("publish", waits=True):
            publish(world, trainer, duties)
        for source in stages.columns:
            source.end_step(step)
        with timers("save"):
            stages.save()
        duties.end_step(step, stats | trainer.costs, timers)
    duties.finish()


class _Batches:
    """The rows that one rank trains on."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        trainer: TrainingEngine,
        reader: Reader,
        duties: Duties[Portion],
        stop: Callable[[], None],
    ) -> None:
        self._stop = stop
        self._config, self._world, self._trainer = config, world, trainer
        self._reader, self._duties = reader, duties
        self._replica = world.split(trainer.dp_rank)
        self._sight = sight_of(config, reader)
        self._sight.serve(trainer)

    def portions(
        self, step: int, timers: Timers
    ) -> Iterator[tuple[list[Trajectory], RankPortion, bool]]:
        """Yields the rank's share of the batch of `step` as it comes: rows, and whether it is the
        last.

        Engines that come meanwhile get the current policy.
        """
        last = False
        while not last:
            dealt = self._duties.next_task(step, timers)
            with timers("read"):
                portion = heard(self._world, dealt)
            if portion is None:
                with timers("publish", waits=True):
                    publish(self._world, self._trainer, self._duties)
                self._stop()
                continue
            with timers("read"):
                share, last = share_of(portion, self._trainer.dp_rank), portion.record.last
                rows = self._read(portion, share)
            yield rows, share, last

    def _read(self, portion: Portion, share: RankPortion) -> list[Trajectory]:
        """Returns the rows of `share` on all ranks of a replica; one of them reads."""
        schedule, record = self._config.schedule, portion.record
        columns, planned = {*self._config.columns, *self._sight.columns}, share.columns
        teachers = columns_by_teacher(self._config.teachers).values()
        rows = self._reader.rows(record, share.rows, columns) if self._replica.rank == 0 else []
        if schedule.over_age == "mask":
            limit = schedule.max_staleness
            rows = [mask_over_age(row, step=record.step, max_staleness=limit) for row in rows]
        rows = self._replica.bcast([of_its_teacher(row, teachers) for row in rows])
        self._sight.note(record, share.rows, rows)
        return [
            row.with_columns(**{name: values[place] for name, values in planned.items()})
            for place, row in enumerate(rows)
        ]


def objective_in(config: RunConfig) -> Objective:
    columns = frozenset(name.split("/")[1] for name in config.columns)
    return objective_of(config.algorithm, columns)


def _update(trainer: TrainingEngine, *, learns: bool) -> dict[str, float]:
    """Updates the policy; keeps it if only the critic learns."""
    if learns:
        return trainer.update()
    trainer.step += 1
    return {}


def publish(world: World, trainer: TrainingEngine, duties: Duties[Portion]) -> None:
    """Gives the engines the current policy. Collective: gathering tensors needs every rank."""
    again = True
    while again:
        again = world.bcast(duties.publish(trainer.step, trainer.stream_weights()))


class ActorOtherRank(Duties[Portion]):
    """The duties of ranks other than 0: they help to publish."""

    def __init__(self, ranks: TrainerRanks) -> None:
        self._ranks = ranks

    def publish(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> bool:
        self._ranks.publish(tensors)
        return False


def serve(
    world: World,
    trainer: TrainingEngine,
    duties: Duties[Portion],
    wait_for_wanted: Callable[[], Literal["publish", "end"]] | None,
) -> None:
    """Gives the last policy to engines that come, until it is evaluated. Collective.

    Args:
        trainer: holds the last policy.
        wait_for_wanted: of rank 0's `LastPolicy`, which decides for all; None on the other ranks.
    """
    while True:
        with heartbeat.phase("last evaluation", waits=True):
            wanted = heard(world, wait_for_wanted() if wait_for_wanted else None)
        if wanted == "end":
            return
        if wanted == "publish":
            publish(world, trainer, duties)
