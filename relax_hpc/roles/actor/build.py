"""Builds an actor rank: trainer, checkpoints, what it publishes with, its duties."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from relax_hpc.bus import layout
from relax_hpc.bus.plan import PlanPosition, is_planned
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.shards.open_shards import OpenShards
from relax_hpc.checkpoints import saving
from relax_hpc.checkpoints.store import Checkpoint, Checkpoints
from relax_hpc.comm.torch_group import init_torch, own_device
from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.megatron.trainer import MegatronTrainer
from relax_hpc.engines.training_engine import TrainingEngine
from relax_hpc.paths import RunPaths
from relax_hpc.roles.actor import last_policy, loop
from relax_hpc.roles.actor.engines import lease_of, register_of
from relax_hpc.roles.actor.logprob_check import LogprobCheck
from relax_hpc.roles.actor.other_ranks import OtherRank
from relax_hpc.roles.actor.publishing import Publications, Publishing
from relax_hpc.roles.actor.rank0 import Rank0
from relax_hpc.roles.actor.reference import Reference
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.dealing.judging import judge_of, most_skipped
from relax_hpc.roles.dealing.portions import check_errors
from relax_hpc.roles.ending import Ending
from relax_hpc.roles.idle import Idle
from relax_hpc.roles.training.build import tell_parameters, trainer_of
from relax_hpc.roles.training.last_save import LastSave
from relax_hpc.roles.turns import Turns
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.telemetry.timers import Timers


def main(
    config: RunConfig, paths: RunPaths, world: World, context: TaskContext, events: EventWriter
) -> None:
    """Resumes from the newest checkpoint, if there is one, and trains to the end."""
    register = register_of(config, paths)
    lease = lease_of(config, world, register, context, events)
    device, starting = own_device(context.local_rank, asked=context.gpus), Timers()
    with starting("model"):
        trainer, columns = _model(config, world, device, events)
    checkpoints, *others = (
        saving.checkpoints_of(
            config.actor, paths, world, PlanPosition,
            timeout_s=config.launch.peer_timeout_s,
            is_valid=lambda position: is_planned(paths.bus, position),
            lacks=partial(saving.lack_of, paths), folder=folder,
        )
        for folder in [paths.checkpoints, *[paths.critic_checkpoints] * bool(config.critic)]
    )  # fmt: skip
    with starting("load"):
        resumed = saving.resume(checkpoints, trainer, events)
    shards = OpenShards(paths.bus)  # on rank 0 what the sequencer opens, the reader finds open
    reader = Reader(paths.bus, shards=shards)
    shares_gpus = config.rollout_pool.placement == "actor"
    publishing = Publishing(
        config.weights, world, trainer, device, folder=paths.weights, source=config.model.path,
        shares_gpus=shares_gpus,
    )  # fmt: skip
    rank0 = ending = last = None
    if world.rank == 0:
        tell_parameters(config, events)
        publisher: Publications = (
            publishing.snapshots(paths)
            if config.launch.layout == "separate"
            else publishing.publisher(register, waits_for_loads=shares_gpus)
        )
        tell_others = Turns(world).tell
        last = last_policy.LastPolicy(config, paths, publisher, tell_others)
        every = [checkpoints, *others]
        ending = Ending(paths, context.attempt)
        rank0 = _rank0(
            config, paths, reader, shards, publisher, every, resumed, events, lambda: stop.is_due(),
            Idle.of(config, paths, context), tell_others,
        )  # fmt: skip
    save = saving.Saving(
        config.actor, paths, world, trainer, checkpoints, rank0, events,
        num_steps=config.num_steps, source=config.model.path,
    )  # fmt: skip
    save.make_up()
    check = LogprobCheck(config, trainer, rank0)
    duties = rank0 or OtherRank(publishing.ranks)
    stop = LastSave(world, trainer, save, ending, context.end)
    stages = loop.Stages(save, columns, [check], lease, stop)
    with starting("warm_up"):
        if device.type == "cuda":  # engines load their programs meanwhile
            trainer.warm_up()
    if rank0:
        events.emit("phases", step=0, phases=starting.phases)
    loop.run(config, world, trainer, reader, duties, stages)
    stop.close()
    last_policy.serve(world, trainer, duties, last)
    duties.close()
    lease.close()
    world.barrier()
    torch.distributed.destroy_process_group()


def _model(
    config: RunConfig, world: World, device: torch.device, events: EventWriter
) -> tuple[MegatronTrainer, list[Reference]]:
    """Makes the model with its optimizer, and what else computes with it."""
    init_torch(world, device="cuda" if device.type == "cuda" else "cpu")
    trainer = trainer_of(config, world, device)
    return trainer, own_columns(config, trainer, events if world.rank == 0 else None)


def own_columns(
    config: RunConfig, trainer: TrainingEngine, events: EventWriter | None
) -> list[Reference]:
    """Parts of the actor that add to rows; `trainer` holds model.path still."""
    reference = config.reference
    if reference.placement != "actor":
        return []
    return [
        Reference(trainer, reference.path, refresh_every=reference.refresh_every, events=events)
    ]


def _rank0(
    config: RunConfig,
    paths: RunPaths,
    reader: Reader,
    shards: OpenShards,
    publisher: Publications,
    checkpoints: Sequence[Checkpoints[PlanPosition]],
    resumed: Checkpoint[PlanPosition] | None,
    events: EventWriter,
    is_ending: Callable[[], bool],
    idle: Idle,
    tell_others: Callable[[], None],
) -> Rank0:
    if config.reward.masks_errors:
        check_errors(config.algorithm)
    if resumed is None:
        saving.check_begin(paths)
    judge = judge_of(config)
    sequencer = Sequencer(
        paths.bus,
        prompts_per_step=config.schedule.prompts_per_step,
        position=resumed.position if resumed else None,
        needs=layout.roles_of(layout.open_bus(paths.bus), config.columns),
        over_age=config.schedule.over_age,
        max_staleness=config.schedule.max_staleness,
        keep_steps=config.bus.keep_steps,
        shards=None if judge else shards,  # groups are admitted while others are read
        judge=judge,
        most_skipped=most_skipped(config),
    )
    rank0 = Rank0(
        config, sequencer, reader, publisher, checkpoints, events, is_ending, idle, tell_others
    )
    if resumed:  # an earlier incarnation may have died before it did
        rank0.release()
    return rank0
