"""Builds an actor rank: trainer, checkpoints, publisher, lease and duties.

If a rank is killed, Slurm ends the others and the script starts all again
(`launch/supervision.sh`).

* In a step: the newest checkpoint is loaded (`checkpoints.store`); planned batches are trained as
  planned (`bus.sequencer`); engines that are ahead wait for their policy (`weights.publish`).
* In an update: see `weights`.
* In a checkpoint: its draft has no name yet and is deleted; the one before counts. Shards stay
  until a checkpoint covers them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from relax_hpc.bus import layout
from relax_hpc.bus.plan import PlanPosition
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.shards.shard import OpenShards
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.config.run import RunConfig
from relax_hpc.inference import members
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.members import EngineRegistry, Member
from relax_hpc.roles.actor import loop
from relax_hpc.roles.actor.lease import Lease, SharedGpus
from relax_hpc.roles.actor.loop import ActorOtherRank, Reference
from relax_hpc.roles.actor.rank0 import ActorRank0, LastPolicy, LogprobCheck, Publications
from relax_hpc.roles.dealing.portions import check_errors, judge_of, most_skipped
from relax_hpc.roles.ending import Ending, LastSave
from relax_hpc.roles.idle import Idle
from relax_hpc.roles.role import ModelRank
from relax_hpc.roles.training.build import (
    RankStart,
    checkpoints_on_plan,
    tell_parameters,
    trainer_of,
)
from relax_hpc.roles.training.duties import Turns
from relax_hpc.runtime.comm.mpi_door import door_type
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.trainer.checkpoints import saving
from relax_hpc.trainer.checkpoints.store import Checkpoint, Checkpoints
from relax_hpc.trainer.megatron.scorer import MegatronScorer
from relax_hpc.trainer.megatron.trainer import MegatronTrainer
from relax_hpc.trainer.training_engine import TrainingEngine
from relax_hpc.weights import quantize
from relax_hpc.weights.meeting.files import FilesCarrier
from relax_hpc.weights.meeting.invitation import Carrier
from relax_hpc.weights.meeting.mpi import MpiCarrier
from relax_hpc.weights.publish import Publisher
from relax_hpc.weights.pull_snapshot import SnapshotPublisher
from relax_hpc.weights.quantize import Quantizer
from relax_hpc.weights.same_gpu import LaneLink, Sleep, give_lane
from relax_hpc.weights.snapshot import SnapshotWriter
from relax_hpc.weights.staging import give_gathered
from relax_hpc.weights.transport import Give, TrainerRanks, call_timeout_s


def main(rank: ModelRank[RunConfig]) -> None:
    """Resumes from the newest checkpoint, if any, and trains to the end."""
    config, paths, world, events = rank.config, rank.paths, rank.world, rank.events
    register = register_of(config, paths)
    lease = _lease(rank, register)
    start = RankStart(rank)
    trainer, columns = start.build(partial(_model, config, world, events))
    checkpoints, *others = (
        checkpoints_on_plan(rank, config.actor, folder)
        for folder in [paths.checkpoints, *[paths.critic_checkpoints] * bool(config.critic)]
    )
    resumed = start.resume(checkpoints, trainer)
    shards = OpenShards(paths.bus)  # on rank 0 what the sequencer opens, the reader finds open
    reader = Reader(paths.bus, shards=shards)
    shares_gpus = config.rollout_pool.placement == "actor"
    publishing = Publishing(
        config.weights, world, trainer, start.device, folder=paths.weights,
        source=config.model.path, lanes_per_rank=config.rollout_pool.lanes_per_rank,
    )  # fmt: skip
    rank0 = ending = last = None
    if world.rank == 0:
        tell_parameters(config, events)
        publisher: Publications = (
            publishing.snapshots(paths)
            if config.launch.layout == "separate"
            else publishing.publisher(
                register, waits_for_loads=shares_gpus, carriers=partial(carriers_of, config, paths)
            )
        )
        tell_others = Turns(world).tell
        last = LastPolicy(config, paths, publisher, tell_others)
        ending = Ending(paths, rank.context.attempt)
        rank0 = _rank0(
            rank, reader, shards, publisher, [checkpoints, *others], resumed,
            lambda: stop.is_due(), tell_others,
        )  # fmt: skip
    save = start.save(config.actor, trainer, checkpoints, rank0)
    save.make_up()
    check = LogprobCheck(config, trainer, rank0)
    duties = rank0 or ActorOtherRank(publishing.ranks)
    stop = LastSave(world, trainer, save, ending, rank.context.end)
    stages = loop.Stages(save, columns, [check], lease, stop)
    with start.timers("warm_up"):
        if start.device.type == "cuda":  # engines load their programs meanwhile
            trainer.warm_up()
    if rank0:
        start.log_phases()
    loop.run(config, world, trainer, reader, duties, stages)
    stop.close()
    loop.serve(world, trainer, duties, last.wait_for_wanted if last else None)
    if rank0:
        checkpoints.prune()  # now that the last scores are there
    duties.close()
    lease.close()
    start.end()


def _model(
    config: RunConfig, world: World, events: EventWriter, device: torch.device
) -> tuple[MegatronTrainer, list[Reference]]:
    trainer = trainer_of(config, world, device)
    return trainer, own_columns(config, trainer, events if world.rank == 0 else None)


def own_columns(
    config: RunConfig, trainer: TrainingEngine, events: EventWriter | None
) -> list[Reference]:
    """Returns the parts of the actor that add columns to rows; `trainer` still holds model.path."""
    reference = config.reference
    if reference.placement != "actor":
        return []
    return [
        Reference(trainer, reference.path, refresh_every=reference.refresh_every, events=events)
    ]


def _rank0(
    rank: ModelRank[RunConfig],
    reader: Reader,
    shards: OpenShards,
    publisher: Publications,
    checkpoints: Sequence[Checkpoints[PlanPosition]],
    resumed: Checkpoint[PlanPosition] | None,
    is_ending: Callable[[], bool],
    tell_others: Callable[[], None],
) -> ActorRank0:
    config, paths = rank.config, rank.paths
    idle = Idle.of(config, paths, rank.context)
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
    rank0 = ActorRank0(
        config, sequencer, reader, publisher, checkpoints, rank.events, is_ending, idle, tell_others
    )
    if resumed:  # an earlier incarnation may have died before it did
        rank0.release()
    return rank0


class Publishing:
    """A rank's part in publications. All ranks of the trainer make one together.

    Args:
        source: Hugging Face folder with config.json and tokenizer for snapshots.
        lanes_per_rank: engine ranks on each of the trainer's own GPUs; 0 if they are elsewhere.
    """

    def __init__(
        self,
        config: WeightsConfig,
        world: World,
        model: MegatronScorer,
        device: torch.device,
        *,
        folder: Path,
        source: Path,
        lanes_per_rank: int,
    ) -> None:
        self._config, self._device = config, device
        by_lanes = lanes_per_rank > 0 and config.transport == "collective"
        specs = model.weight_specs()
        plain = model.gather(config.advanced.bucket_bytes, to_all=by_lanes)
        self._plan, self._gather = quantize.gather(config, specs, plain)
        self._link = None
        if by_lanes:
            self._link = LaneLink(world, self._plan, device, config, lanes_per_rank)
        quantizer = Quantizer.of(config)
        snapshots = SnapshotWriter(folder, specs, world, source, quantizer=quantizer)
        self.ranks = TrainerRanks(world, snapshots, self._others())

    def publisher(
        self,
        register: EngineRegistry,
        *,
        waits_for_loads: bool,
        carriers: Callable[[ThreadPoolExecutor], Sequence[Carrier]] = lambda _: (),
    ) -> Publisher:
        """Returns rank 0's publisher to the members in `register`.

        Args:
            waits_for_loads: as in `Publisher`.
            carriers: of invitations, fastest first.
        """
        return Publisher(
            self._config,
            register,
            self._plan,
            device=self._device,
            ranks=self.ranks,
            gather=self._gather,
            link=self._link,
            waits_for_loads=waits_for_loads,
            carriers=carriers,
        )

    def snapshots(self, paths: RunPaths) -> SnapshotPublisher:
        return SnapshotPublisher(self._config, paths, self._plan, self.ranks)

    def _others(self) -> dict[str, Give]:
        if self._link:
            return {"lanes": partial(give_lane, self._link, self._gather)}
        return {"collective": partial(give_gathered, self._gather)}


def register_of(config: RunConfig, paths: RunPaths) -> EngineRegistry:
    extras = members.follow_extras(paths)
    return EngineRegistry(
        paths,
        lambda: [*config.rollout_engines, *extras()],
        partial(_connect, config, RunSecret.read(paths.secret)),
    )


def carriers_of(config: RunConfig, paths: RunPaths, threads: ThreadPoolExecutor) -> list[Carrier]:
    match config.launch.advanced.bootstrap:
        case "http":
            return []
        case "files":
            return [FilesCarrier(paths, threads, config.weights.advanced.timeout_s)]
        case bootstrap:
            door = door_type(is_one_world=bootstrap == "mpi_job")
            return [MpiCarrier(paths, RunSecret.read(paths.secret), door)]


def _lease(rank: ModelRank[RunConfig], register: EngineRegistry) -> Lease:
    """Returns the lease when the GPUs are free for the trainer. Collective."""
    config, sleep = rank.config, None
    if config.rollout_pool.placement != "actor":
        return Lease()
    if rank.world.rank == 0:
        sleep = Sleep(
            register,
            rank.context.attempt,
            timeout_s=config.weights.advanced.timeout_s,
            start_timeout_s=config.rollout_pool.advanced.start_timeout_s,
        )
    return SharedGpus(rank.world, sleep, rank.events)


def _connect(config: RunConfig, secret: RunSecret, member: Member) -> EngineClient:
    return EngineClient(
        member.url,
        secret.engine_token(member.id, member.start),
        timeout_s=call_timeout_s(config.weights.advanced.timeout_s),
        recompute=config.weights.advanced.kv_cache == "recompute",
        has_prefix_cache=not config.rollout_pool.args.get("disable_radix_cache"),
    )
