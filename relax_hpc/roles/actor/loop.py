"""The actor role: trains on batches in their order, each portion as soon as it is there."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from relax_hpc.algorithms.composition import Objective, objective_of
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.staleness import mask_over_age
from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.config.teachers import columns_by_teacher
from relax_hpc.engines.training_engine import TrainingEngine
from relax_hpc.roles.actor.lease import Lease, OwnGpus
from relax_hpc.roles.actor.reference import Reference
from relax_hpc.roles.dealing.portions import Portion, Share, share_of
from relax_hpc.roles.dealing.sight import sight_of
from relax_hpc.roles.teacher.routing import of_its_teacher
from relax_hpc.roles.training.steps import StepLog, stop_or_go_on
from relax_hpc.roles.turns import heard
from relax_hpc.schema import Trajectory
from relax_hpc.telemetry.timers import Timers


class Duties(StepLog, Protocol):
    """A rank's work besides training: rank 0 decides, serves and notes, the others help."""

    def next_portion(self, step: int, timers: Timers) -> Portion | None:
        """Rank 0's counts: the next part of the batch; None if engines need the weights first, or
        the job is about to end."""
        ...

    def publish(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> bool:
        """The rank's part in giving engines the policy; rank 0 says whether some are left."""
        ...

    def finish(self) -> None: ...
    def close(self) -> None: ...


def nothing() -> None: ...


class Stages(NamedTuple):
    """A run's work around its steps, besides what all runs do."""

    save: Callable[[], None]
    """Called after every step; saves when it is time to."""
    columns: Sequence[Reference] = ()
    """Parts that add to rows, in this order."""
    checks: Sequence[Callable[[], None]] = ()
    """Called when the gradient of a batch is there, and not applied yet."""
    lease: Lease = OwnGpus()
    stop: Callable[[], None] = nothing
    """Called before every step, and now and then while a batch is waited for; collective."""


def run(
    config: RunConfig,
    world: World,
    trainer: TrainingEngine,
    reader: Reader,
    duties: Duties,
    stages: Stages,
) -> None:
    """Trains until `num_steps`.

    Rank 0 decides who trains what; of each data-parallel replica one rank reads it, the others are
    told. The order is the protocol: publish, save, and only then release, which `save` does once a
    checkpoint is complete. A shard is forgotten when no resume can need it, so a restarted actor
    finds its next batches.
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
    """The rows that one rank is given to train on."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        trainer: TrainingEngine,
        reader: Reader,
        duties: Duties,
        stop: Callable[[], None],
    ) -> None:
        self._stop = stop
        self._config, self._world, self._trainer = config, world, trainer
        self._reader, self._duties = reader, duties
        self._replica = world.split(trainer.dp_rank)
        self._sight = sight_of(config, reader)
        self._sight.serve(trainer)

    def portions(self, step: int, timers: Timers) -> Iterator[tuple[list[Trajectory], Share, bool]]:
        """The rank's share of the batch of `step`, as it comes: rows, and whether it is the last.

        Engines that come meanwhile are given the current policy.
        """
        last = False
        while not last:
            dealt = self._duties.next_portion(step, timers)
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

    def _read(self, portion: Portion, share: Share) -> list[Trajectory]:
        """The rows of `share`, on all ranks of a replica, which one of them reads."""
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
    """The function that the run's algorithm minimizes."""
    columns = frozenset(name.split("/")[1] for name in config.columns)
    return objective_of(config.algorithm, columns)


def _update(trainer: TrainingEngine, *, learns: bool) -> dict[str, float]:
    """The next policy; where only the critic learns it is the one before."""
    if learns:
        return trainer.update()
    trainer.step += 1
    return {}


def publish(world: World, trainer: TrainingEngine, duties: Duties) -> None:
    """Gives the engines the current policy. Bringing tensors together needs every rank."""
    again = True
    while again:
        again = world.bcast(duties.publish(trainer.step, trainer.named_weights()))
