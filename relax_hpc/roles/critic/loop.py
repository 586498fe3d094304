"""Runs the critic: values committed rows, and learns from every planned batch.

Learning comes first: before it values a shard it has learned from every batch that was planned when
the shard was committed. So the critic that values a prompt group is at least as new as the policy
that sampled the group's first token, and values are no staler than tokens.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from relax_hpc.algorithms.composition import Objective
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.staleness import mask_over_age
from relax_hpc.config.run import RunConfig
from relax_hpc.roles.dealing.micro_batches import OwnRows, own_rows
from relax_hpc.roles.dealing.sight import StepMedia
from relax_hpc.roles.scorer.loop import Round, score
from relax_hpc.roles.training.duties import Duties, nothing, stop_or_go_on
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.schema import Trajectory
from relax_hpc.trainer.training_engine import TrainingEngine

VALUES = "ragged/values"


class Readers(NamedTuple):
    """A rank's readers; each closes shards when its own next step comes."""

    lessons: Reader
    rounds: Reader


def run(
    config: RunConfig, world: World, critic: TrainingEngine, objective: Objective,
    readers: Readers, duties: Duties[Round], save: Callable[[], None],
    stop: Callable[[], None] = nothing,
) -> None:  # fmt: skip
    """Learns and values until the last step is trained and no more values are needed.

    Rank 0 decides the next task and deals it out. One rank of each data-parallel replica reads. All
    training rows are in the plan: a restart learns the same again.

    Args:
        stop: called before every task, and during waits; collective.
    """
    replica, sight = world.split(critic.dp_rank), StepMedia(readers.rounds, None)
    for task, timers in _tasks(world, critic, duties, stop):
        heartbeat.at_step(critic.step + 1)
        if task.rewards is None:
            values = score(world, replica, critic, readers.rounds, task, sight)
            duties.put(values, version=critic.step)
            continue
        own = own_rows(task.micro_batches[critic.dp_rank])
        with timers("read"):
            reads = replica.rank == 0
            rows = replica.bcast(_rows_of(config, readers.lessons, task, own) if reads else [])
        with timers.phase("train"):
            critic.accumulate(rows, own.micro_batches, objective, last=True)
            stats = critic.update()
        stop_or_go_on(duties, task.step, critic.skip)
        with timers("save"):
            save()
        duties.end_step(task.step, stats | critic.costs, timers)


def _tasks(
    world: World, critic: TrainingEngine, duties: Duties[Round], stop: Callable[[], None]
) -> Iterator[tuple[Round, Timers]]:
    stop()
    while task := world.bcast(duties.next_task(critic.step, timers := Timers())):
        yield task, timers
        stop()


def _rows_of(config: RunConfig, reader: Reader, task: Round, own: OwnRows) -> list[Trajectory]:
    assert task.rewards is not None
    found, schedule = reader.rows(task, own.rows, columns=(VALUES,)), config.schedule
    if schedule.over_age == "mask":
        limit = schedule.max_staleness
        found = [mask_over_age(row, step=task.step, max_staleness=limit) for row in found]
    return [
        row._replace(columns={"values": row.columns["values"], "advantages": reward})
        for row, reward in zip(found, task.rewards[own.rows], strict=True)
    ]
