"""The critic role: gives what is committed values, and learns from every batch that is planned.

It trains first: before it values a shard it has learned from every batch that was planned when the
shard was committed. So the version of it that values a prompt group is at least the policy that
sampled the group's first token, and values are no staler than tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from relax_hpc.algorithms.composition import Objective
from relax_hpc.bus.plan import Part, Sidecar
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.staleness import mask_over_age
from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.training_engine import TrainingEngine
from relax_hpc.roles.dealing.micro_batches import MicroBatches, OwnRows, own_rows
from relax_hpc.roles.scorer.loop import Round
from relax_hpc.roles.training.steps import NoLog, StepLog, stop_or_go_on
from relax_hpc.schema import Role, Trajectory
from relax_hpc.telemetry.timers import Timers

VALUES = "ragged/values"
Floats = npt.NDArray[np.float32]


def nothing() -> None: ...


class Lesson(NamedTuple):
    """A batch of the plan, and who trains what of it; rows count in its order."""

    step: int
    parts: list[Part]
    sidecars: Mapping[str, dict[Role, Sidecar]]
    rewards: Floats
    """[rows], what the algorithm compares."""
    micro_batches: list[MicroBatches]
    """Micro-batches per data-parallel rank."""


class Duties(StepLog, Protocol):
    """A rank's work besides the model: rank 0 follows plan and bus, deals and writes."""

    def next_task(self, step: int) -> Lesson | Round | None:
        """Rank 0's counts: what comes after `step` was trained; None: the run is over.

        Until there is something, the job is about to end, or it is time that waiting ranks hear
        of rank 0, it waits.
        """
        ...

    def put(self, values: Sequence[Floats], *, version: int) -> None:
        """Takes the [tokens] of every row of the last round."""
        ...

    def close(self) -> None: ...


class OtherRank(NoLog):
    """The duties of ranks besides rank 0."""

    def next_task(self, step: int) -> None: ...
    def put(self, values: Sequence[Floats], *, version: int) -> None: ...
    def close(self) -> None: ...


class Readers(NamedTuple):
    """A rank's readers: each lets go of shards when its own next step comes."""

    lessons: Reader
    rounds: Reader


def run(
    config: RunConfig, world: World, critic: TrainingEngine, objective: Objective,
    readers: Readers, duties: Duties, save: Callable[[], None],
    stop: Callable[[], None] = nothing,
) -> None:  # fmt: skip
    """Learns and values until the last step is trained and nobody wants values any more.

    Rank 0 decides what is next and who computes what; of each data-parallel replica one rank
    reads it. Everything that it learns from is in the plan: a restart learns the same again.

    Args:
        stop: called before whatever comes next, and now and then while there is nothing;
            collective.
    """
    replica = world.split(critic.dp_rank)
    for task in _tasks(world, critic, duties, stop):
        timers, own = Timers(critic.step + 1), own_rows(task.micro_batches[critic.dp_rank])
        reads = replica.rank == 0
        if isinstance(task, Round):
            rows = readers.rounds.rows(task, own.rows, columns=()) if reads else []
            rows = replica.bcast(rows)
            values = critic.forward_logprobs(rows, own.micro_batches)
            mine = dict(zip(own.rows, values, strict=True)) if reads else {}
            merged = {row: found for part in world.allgather(mine) for row, found in part.items()}
            duties.put([merged[row] for row in sorted(merged)], version=critic.step)
            continue
        with timers("read"):
            rows = replica.bcast(_rows_of(config, readers.lessons, task, own) if reads else [])
        with timers.phase("train"):
            critic.accumulate(rows, own.micro_batches, objective, last=True)
            stats = critic.update()
        stop_or_go_on(duties, task.step, critic.skip)
        with timers("save"):
            save()
        duties.end_step(task.step, stats | critic.costs, timers)


def _tasks(
    world: World, critic: TrainingEngine, duties: Duties, stop: Callable[[], None]
) -> Iterator[Lesson | Round]:
    stop()
    while task := world.bcast(duties.next_task(critic.step)):
        yield task
        stop()


def _rows_of(config: RunConfig, reader: Reader, task: Lesson, own: OwnRows) -> list[Trajectory]:
    """The rows with what the loss asks for: their values, and what they were worth in the end."""
    found, schedule = reader.rows(task, own.rows, columns=(VALUES,)), config.schedule
    if schedule.over_age == "mask":
        limit = schedule.max_staleness
        found = [mask_over_age(row, step=task.step, max_staleness=limit) for row in found]
    return [
        row._replace(columns={"values": row.columns["values"], "advantages": task.rewards[place]})
        for row, place in zip(found, own.rows, strict=True)
    ]
