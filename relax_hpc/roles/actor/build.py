"""Builds an actor rank: trainer, checkpoints, and on rank 0 the lead."""

from functools import partial

import torch

from relax_hpc.bus.plan import PlanPosition, is_planned
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.shards.open_shards import OpenShards
from relax_hpc.checkpoints import saving
from relax_hpc.checkpoints.store import Checkpoint, Checkpoints
from relax_hpc.comm.torch_group import init_torch, own_device
from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.client import EngineClient
from relax_hpc.engines.megatron.reference import SwappedReference
from relax_hpc.engines.megatron.trainer import MegatronTrainer
from relax_hpc.fleet import members
from relax_hpc.fleet.members import Member
from relax_hpc.fleet.register import Register
from relax_hpc.paths import RunPaths
from relax_hpc.roles.actor import loop as actor
from relax_hpc.roles.actor.lease import Lease, OwnGpus, SharedGpus
from relax_hpc.roles.actor.logprob_check import LogprobCheck
from relax_hpc.roles.actor.rank0 import ActorLead
from relax_hpc.roles.actor.reference import HybridReference
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.training.build import trainer_of
from relax_hpc.run_secret import RunSecret
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.weights import quantize
from relax_hpc.weights.lanes import LaneHelper, LaneLink
from relax_hpc.weights.publish import Publisher
from relax_hpc.weights.quantize import Quantizer
from relax_hpc.weights.ranks import Helper, TrainerRanks
from relax_hpc.weights.sleep import Sleep
from relax_hpc.weights.snapshot import SnapshotWriter
from relax_hpc.weights.staging import Gather, Giver
from relax_hpc.weights.transport import call_timeout_s


def main(
    config: RunConfig, paths: RunPaths, world: World, context: TaskContext, events: EventWriter
) -> None:
    """Resumes from the newest checkpoint, if there is one, and trains to the end."""
    register = Register(
        paths,
        lambda: [*config.engines, *members.extras(paths)],
        partial(_connect, config, RunSecret.read(paths.secret)),
    )
    sleep = _sleep(config, register, context) if world.rank == 0 else None
    lease = _lease(config, world, sleep, events)
    device = own_device(context.local_rank)
    init_torch(world, device="cuda" if device.type == "cuda" else "cpu")
    trainer = trainer_of(config, world, device)
    reference = _reference(config, trainer, events if world.rank == 0 else None)
    checkpoints = saving.checkpoints_of(
        config, paths, world, PlanPosition,
        is_valid=lambda position: is_planned(paths.bus, position),
    )  # fmt: skip
    resumed = saving.resume(checkpoints, trainer, events)
    shards = OpenShards(paths.bus)  # on rank 0 what the sequencer opens, the reader finds open
    specs = trainer.weight_specs()
    shares_gpus = config.rollout.placement == "actor" and config.weights.transport == "collective"
    plain = trainer.gather(config.weights.bucket_bytes, to_all=shares_gpus)
    plan, gather = quantize.gathered(config.weights, specs, plain)
    link = LaneLink(world, plan, device, config.weights) if shares_gpus else None
    quantizer, lead = Quantizer.of(config.weights), None
    snapshots = SnapshotWriter(paths.weights, specs, world, config.model.path, quantizer=quantizer)
    ranks = TrainerRanks(world, snapshots, _helpers(gather, link))
    if world.rank == 0:
        publisher = Publisher(
            config.weights, register, plan, device=device, ranks=ranks, gather=gather, link=link,
            waits_for_loads=config.rollout.placement == "actor",
        )  # fmt: skip
        lead = _lead(config, publisher, paths, checkpoints, resumed, shards, events)

    if lead and resumed:  # an earlier incarnation may have died before it did
        lead.release()

    duties = None
    if lead:
        sequencer = lead.sequencer
        duties = saving.Lead(lambda: sequencer.position, sequencer.check_fenced, lead.release)
    save = saving.Saving(config, paths, world, trainer, checkpoints, duties, events)
    reader = Reader(paths.bus, shards=shards)
    check = LogprobCheck(
        config, trainer, lead.compared if lead else None, lead.place_of if lead else None
    )
    actor.run(config, world, trainer, reader, lead, save, reference, ranks, lease, check)
    if lead:
        lead.close()
    if sleep:
        sleep.close()
    world.barrier()
    torch.distributed.destroy_process_group()


def _sleep(config: RunConfig, register: Register, context: TaskContext) -> Sleep | None:
    """Of engines that share the actor's GPUs."""
    if config.rollout.placement != "actor":
        return None
    return Sleep(
        register,
        context.attempt,
        timeout_s=config.weights.timeout_s,
        start_timeout_s=config.rollout.start_timeout_s,
    )


def _lease(config: RunConfig, world: World, sleep: Sleep | None, events: EventWriter) -> Lease:
    """Returns when the GPUs are free for the trainer. Collective."""
    if config.rollout.placement != "actor":
        return OwnGpus()
    return SharedGpus(world, sleep, events)


def _helpers(gather: Gather, link: LaneLink | None) -> dict[str, Helper]:
    """What ranks without a lead do, by the way that weights go."""
    return {"lanes": LaneHelper(link, gather)} if link else {"collective": Giver(gather)}


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


def _connect(config: RunConfig, secret: RunSecret, member: Member) -> EngineClient:
    return EngineClient(
        member.url,
        secret.engine_token(member.id, member.epoch),
        timeout_s=call_timeout_s(config.weights.timeout_s),
        recompute=config.weights.kv_cache == "recompute",
        has_prefix_cache=not config.rollout.engine_args.get("disable_radix_cache"),
    )
