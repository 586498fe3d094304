"""Builds an actor rank: trainer, checkpoints, and on rank 0 the lead."""

import torch

from relax_hpc.bus.open_shards import OpenShards
from relax_hpc.bus.plan import PlanPosition, is_planned
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.comm.torch_group import init_torch, own_device
from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.client import EngineClient
from relax_hpc.engines.megatron.reference import SwappedReference
from relax_hpc.engines.megatron.trainer import MegatronTrainer
from relax_hpc.paths import RunPaths
from relax_hpc.roles import actor, saving
from relax_hpc.roles.checkpoints import Checkpoint, Checkpoints
from relax_hpc.roles.hybrid import HybridReference
from relax_hpc.roles.lead import ActorLead
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.weights import members
from relax_hpc.weights.publish import Publisher
from relax_hpc.weights.ranks import TrainerRanks
from relax_hpc.weights.snapshot import SnapshotWriter
from relax_hpc.weights.staging import Giver


def main(
    config: RunConfig, paths: RunPaths, world: World, local_rank: int, events: EventWriter
) -> None:
    """Resumes from the newest checkpoint, if there is one, and trains to the end."""
    device = own_device(local_rank)
    init_torch(world, device="cuda" if device.type == "cuda" else "cpu")
    trainer = MegatronTrainer(config, world, device)
    reference = _reference(config, trainer, events if world.rank == 0 else None)
    checkpoints = saving.checkpoints_of(
        config, paths, world, PlanPosition,
        is_valid=lambda position: is_planned(paths.bus, position),
    )  # fmt: skip
    resumed = saving.resume(checkpoints, trainer, events)
    shards = OpenShards(paths.bus)  # on rank 0 what the sequencer opens, the reader finds open
    specs = trainer.weight_specs()
    gather, lead = trainer.gather(config.weights.bucket_bytes), None
    snapshots = SnapshotWriter(paths.weights, specs, world, config.model.path)
    ranks = TrainerRanks(world, snapshots, {"collective": Giver(gather)})
    if world.rank == 0:
        publisher = Publisher(
            config.weights, paths, lambda: [*config.producers, *members.extras(paths)],
            lambda its: EngineClient(its.url, its.token, timeout_s=config.weights.timeout_s), specs,
            device=device, ranks=ranks, gather=gather,
        )  # fmt: skip
        lead = _lead(config, publisher, paths, checkpoints, resumed, shards, events)

    if lead and resumed:  # an earlier incarnation may have died before it did
        lead.release()

    duties = None
    if lead:
        sequencer = lead.sequencer
        duties = saving.Lead(lambda: sequencer.position, sequencer.check_fenced, lead.release)
    save = saving.Saving(config, paths, world, trainer, checkpoints, duties, events)
    actor.run(
        config, world, trainer, Reader(paths.bus, shards=shards), lead, save, reference, ranks
    )
    if lead:
        lead.close()
    world.barrier()
    torch.distributed.destroy_process_group()


def _reference(
    config: RunConfig, trainer: MegatronTrainer, events: EventWriter | None
) -> HybridReference | None:
    """That of the hybrid placement; `trainer` holds model.path still."""
    if config.reference.placement != "actor":
        return None
    policy = SwappedReference(trainer, config.reference.path)
    return HybridReference(policy, refresh_every=config.reference.refresh_every, events=events)


def _lead(
    config: RunConfig,
    publisher: Publisher,
    paths: RunPaths,
    checkpoints: Checkpoints[PlanPosition],
    resumed: Checkpoint[PlanPosition] | None,
    shards: OpenShards,
    events: EventWriter,
) -> ActorLead:
    sequencer = Sequencer(
        paths.bus,
        config.producers,
        prompts_per_step=config.algorithm.prompts_per_step,
        position=resumed.position if resumed else None,
        needs=tuple(config.sidecar_writers.values()),
        over_age=config.algorithm.over_age,
        max_staleness=config.algorithm.max_staleness,
        keep_steps=config.bus.keep_steps,
        shards=shards,
    )
    return ActorLead(config, sequencer, publisher, checkpoints, events)
