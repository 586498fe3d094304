"""Runs the critic: values committed rows, and learns from every planned batch.

Learning comes first: before it values a shard it has learned from every batch that was planned when
the shard was committed. So the critic that values a prompt group is at least as new as the policy
that sampled the group's first token, and values are no staler than tokens.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from relax_hpc.algorithms.composition import Objective, value_loss
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.plan import PlanFollower, PlannedBatch, PlanPosition
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.bus.staleness import mask_over_age
from relax_hpc.config.run import RunConfig
from relax_hpc.roles.dealing.micro_batches import OwnRows, deal_rows, own_rows
from relax_hpc.roles.dealing.portions import (
    Comparison,
    lengths_of,
    name_shards,
    shards_of,
    values_of,
)
from relax_hpc.roles.dealing.sight import StepMedia
from relax_hpc.roles.ending import Ending, LastSave
from relax_hpc.roles.role import ModelRank
from relax_hpc.roles.scorer.build import ScorerRank0
from relax_hpc.roles.scorer.loop import Round, score
from relax_hpc.roles.training.build import RankStart, checkpoints_on_plan, sidecar_writer
from relax_hpc.roles.training.duties import Duties, note_skipped, nothing, stop_or_go_on
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.telemetry.progress import account
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.schema import Trajectory
from relax_hpc.trainer.megatron.critic import MegatronCritic
from relax_hpc.trainer.training_engine import SkippedUpdate, TrainingEngine

log = logging.getLogger(__name__)


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


def main(rank: ModelRank[RunConfig]) -> None:
    """Resumes from its newest checkpoint, if any, and learns to the end."""
    config, paths, world, attempt = rank.config, rank.paths, rank.world, rank.context.attempt
    assert config.critic is not None
    start = RankStart(rank)
    critic = start.build(partial(critic_of, config, world))
    when = config.critic.saving(config.actor)
    checkpoints = checkpoints_on_plan(rank, when, paths.critic_checkpoints)
    resumed = start.resume(checkpoints, critic, is_critic=True)
    readers = Readers(Reader(paths.bus), Reader(paths.bus))
    rank0 = ending = None
    if world.rank == 0:
        start.log_phases()
        ending = Ending(paths, attempt, paths.critic_saves(attempt))
        rank0 = _rank0(rank, resumed.position if resumed else None, ending.is_near)
    save = start.save(when, critic, checkpoints, rank0)
    duties = rank0 or Duties[Round]()
    stop = LastSave(world, critic, save, ending)
    run(config, world, critic, objective_of(config), readers, duties, save, stop)
    stop.close()
    duties.close()
    for reader in readers:
        reader.close()
    start.end()


def objective_of(config: RunConfig) -> Objective:
    """Returns the loss of the job's critic, which reads no logprobs."""
    assert config.critic is not None
    loss = value_loss(
        clip=config.critic.advanced.value_clip,
        gamma=config.gamma,
        lam=config.critic.advanced.returns_lambda,
    )
    return Objective(loss, reads_old=False)


def critic_of(config: RunConfig, world: World, device: torch.device) -> MegatronCritic:
    """Builds the critic's model in its own layout, with its optimizer. Collective."""
    assert config.critic is not None
    return MegatronCritic(
        config.critic.model(config.model),
        config.critic.megatron(config.actor),
        config.critic.optimizer(config.actor.optimizer),
        world,
        device,
        num_steps=config.num_steps,
        seed=config.seed,
    )


def _rank0(
    rank: ModelRank[RunConfig], position: PlanPosition | None, is_ending: Callable[[], bool]
) -> "CriticRank0":
    config, bus = rank.config, rank.paths.bus
    assert config.critic is not None
    writer = sidecar_writer(rank, config.critic.model(config.model).path)
    reader, credits = Reader(bus), CreditTail(bus, num_steps=config.num_steps)
    plan = PlanFollower(bus, credits, position)
    return CriticRank0(config, writer, reader, credits, plan, rank.events, is_ending)


class CriticRank0(ScorerRank0):
    """Connects the critic with bus and logs: it values rows as a scorer, and learns from batches.

    Args:
        credits: of the trainer; every look of theirs is fresh.
        plan: behind the step that the critic has trained last.
    """

    def __init__(
        self,
        config: RunConfig,
        writer: SidecarWriter,
        reader: Reader,
        credits: CreditTail,
        plan: PlanFollower,
        events: EventWriter,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        assert config.critic is not None
        megatron = config.critic.megatron(config.actor)
        super().__init__(megatron, VALUES, writer, reader, credits, events, is_ending=is_ending)
        self._config, self._plan = config, plan
        self._shards: dict[int, str] = {}
        """guid -> shard, for the prompt groups of this step."""

    def end_step(self, step: int, fields: dict[str, Any], timers: Timers) -> None:
        fields = {**_explain_variance(fields), **timers.seconds}
        fields.pop("entropy", None)
        fields |= account(timers.elapsed, fields)
        self._events.emit("critic_step", step=step, **fields)
        self._events.emit("phases", step=step, phases=timers.phases)
        log.info(
            "step %d/%d | value loss %.4f | explained %.3f | value %.3f of %.3f | %s",
            step, self._config.num_steps, fields["loss"], fields["value/explained"],
            fields["value/mean"], fields["value/return"], timers,
        )  # fmt: skip

    def note_skipped(self, step: int, skip: SkippedUpdate) -> None:
        note_skipped(self._events, step, skip, self._shards)

    @property
    def position(self) -> PlanPosition:
        return self._plan.position

    def check_fenced(self) -> None:
        """Raises FencedError if another critic took over; also called from another thread."""
        self._writer.check_fenced()

    def release(self) -> None:
        """Does nothing: the actor considers both components' checkpoints, and releases."""

    def close(self) -> None:
        self._plan.close()
        super().close()

    def _is_done(self, step: int) -> bool:
        return step == self._config.num_steps

    def _find_lesson(self, step: int) -> Callable[[], Round] | None:
        batch = self._plan.next_batch()
        if batch is None:
            return None
        assert batch.step == step + 1, f"batch {batch.step} comes after step {step}"
        return partial(self._deal_lesson, batch)

    def _deal_lesson(self, batch: PlannedBatch) -> Round:
        index = self._reader.index(batch)
        first = np.cumsum([0, *(part.hi - part.lo for part in batch.parts)])[:-1]
        self._shards = name_shards(self._config.run_dir, index.guid[first].tolist(), batch.parts)
        columns, chosen = values_of(index, Comparison.of(self._config))
        rewards = columns["advantages"].astype(np.float32)  # before rows are read they are that
        shards = shards_of(batch.parts)
        micro_batches = deal_rows(self._megatron, lengths_of(index), chosen, shards)
        return Round(
            batch.step, batch.parts, micro_batches, sidecars=batch.sidecars, rewards=rewards
        )


def _explain_variance(fields: dict[str, Any]) -> dict[str, Any]:
    """Adds the share of the returns' variance that the values explain."""
    error, squares = fields.pop("value/error", 0.0), fields.pop("value/square_error", 0.0)
    mean, square = fields.get("value/return", 0.0), fields.pop("value/square_return", 0.0)
    variance = square - mean**2
    explained = 1 - (squares - error**2) / variance if variance > 1e-12 else 0.0
    return {**fields, "value/return": mean, "value/explained": explained}
