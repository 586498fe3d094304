"""Builds a rank of the critic: its model, its checkpoints, its duties."""

from collections.abc import Callable
from functools import partial

import torch

from relax_hpc.algorithms.composition import Objective
from relax_hpc.algorithms.value_loss import value_loss
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.follower import PlanFollower
from relax_hpc.bus.plan import PlanPosition, is_planned
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.checkpoints import saving
from relax_hpc.comm.torch_group import init_torch, own_device
from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.megatron.critic import MegatronCritic
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.critic import loop
from relax_hpc.roles.critic.rank0 import Rank0
from relax_hpc.roles.ending import Ending
from relax_hpc.roles.scorer import rank0 as scorer
from relax_hpc.roles.training.last_save import LastSave
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.telemetry.timers import Timers


def main(
    config: RunConfig, paths: RunPaths, world: World, context: TaskContext, events: EventWriter
) -> None:
    """Resumes from its newest checkpoint, if there is one, and learns to the end."""
    assert config.critic is not None
    device = own_device(context.local_rank, asked=context.gpus)
    starting = Timers()
    with starting("model"):
        init_torch(world, device="cuda" if device.type == "cuda" else "cpu")
        critic = critic_of(config, world, device)
    when = config.critic.saving(config.actor)
    checkpoints = saving.checkpoints_of(
        when, paths, world, PlanPosition,
        timeout_s=config.launch.peer_timeout_s,
        is_valid=lambda position: is_planned(paths.bus, position),
        lacks=partial(saving.lack_of, paths),
        folder=paths.critic_checkpoints,
    )  # fmt: skip
    with starting("load"):
        resumed = saving.resume(checkpoints, critic, events, is_critic=True)
    readers = loop.Readers(Reader(paths.bus), Reader(paths.bus))
    rank0 = ending = None
    if world.rank == 0:
        events.emit("phases", step=0, phases=starting.phases)
        position = resumed.position if resumed else None
        ending = Ending(paths, context.attempt, paths.critic_saves(context.attempt))
        rank0 = _rank0(config, paths, context, position, events, ending.is_near)
    save = saving.Saving(
        when, paths, world, critic, checkpoints, rank0, events,
        num_steps=config.num_steps, source=config.model.path,
    )  # fmt: skip
    loss = value_loss(
        clip=config.critic.value_clip, gamma=config.gamma, lam=config.critic.returns_lambda
    )
    objective = Objective(loss, reads_old=False)
    duties = rank0 or loop.OtherRank()
    stop = LastSave(world, critic, save, ending)
    loop.run(config, world, critic, objective, readers, duties, save, stop)
    stop.close()
    duties.close()
    for reader in readers:
        reader.close()
    world.barrier()
    torch.distributed.destroy_process_group()


def critic_of(config: RunConfig, world: World, device: torch.device) -> MegatronCritic:
    """The critic's model in its own layout, with its optimizer. Collective."""
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
    config: RunConfig,
    paths: RunPaths,
    context: TaskContext,
    position: PlanPosition | None,
    events: EventWriter,
    is_ending: Callable[[], bool],
) -> Rank0:
    assert config.critic is not None
    model = config.critic.model(config.model)
    provenance: dict[str, str | int] = {
        "run": config.name,
        "job": context.attempt,
        "component": context.component,
        "start": context.start,
        "node": context.node,
        "model": str(model.path),
    }
    writer = SidecarWriter(paths.bus, context.name, provenance, compress=config.bus.compress)
    reader, credits = Reader(paths.bus), CreditTail(paths.bus, num_steps=config.num_steps)
    megatron = config.critic.megatron(config.actor)
    scoring = scorer.Rank0(megatron, loop.VALUES, writer, reader, credits, events)
    plan = PlanFollower(paths.bus, credits, position)
    return Rank0(config, writer, reader, credits, plan, scoring, events, is_ending)
