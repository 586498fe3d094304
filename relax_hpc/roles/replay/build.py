"""Builds a rank that trains a step again: the actor's loop, without engines and without saves."""

import torch

from relax_hpc.bus.plan import read_chain
from relax_hpc.bus.reader import Reader
from relax_hpc.comm.torch_group import init_torch, own_device
from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.paths import RunPaths
from relax_hpc.roles.actor import loop
from relax_hpc.roles.actor.build import own_columns
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.replay.duties import OtherRank, Rank0
from relax_hpc.roles.replay.record import Replay
from relax_hpc.roles.training.build import trainer_of
from relax_hpc.telemetry.events import EventWriter


def main(
    config: RunConfig, paths: RunPaths, world: World, context: TaskContext, events: EventWriter
) -> None:
    """Trains the steps of a replay, from its checkpoint on."""
    asked = Replay.read(paths.replayed)
    device = own_device(context.local_rank, asked=context.gpus)
    init_torch(world, device="cuda" if device.type == "cuda" else "cpu")
    trainer = trainer_of(config, world, device)
    columns = own_columns(config, trainer, None)
    if asked.checkpoint is not None:
        trainer.load(asked.checkpoint)
    bus = RunPaths(asked.run_dir).bus
    reader = Reader(bus)
    duties: loop.Duties = OtherRank()
    if world.rank == 0:
        duties = Rank0(config, reader, read_chain(bus).steps, events)
    stages = loop.Stages(loop.nothing, columns)
    loop.run(until(config, asked.step), world, trainer, reader, duties, stages)
    world.barrier()
    torch.distributed.destroy_process_group()


def until(config: RunConfig, step: int) -> RunConfig:
    """The run as if that step were its last."""
    schedule = config.schedule.model_copy(update={"num_steps": step})
    return config.model_copy(update={"schedule": schedule})
