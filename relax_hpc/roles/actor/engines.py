"""The engines of a run as its actor sees them: which there are, and whose GPUs they use."""

from functools import partial

from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.client import EngineClient
from relax_hpc.fleet import members
from relax_hpc.fleet.members import Member
from relax_hpc.fleet.register import Register
from relax_hpc.paths import RunPaths
from relax_hpc.roles.actor.lease import Lease, OwnGpus, SharedGpus
from relax_hpc.roles.context import TaskContext
from relax_hpc.run_secret import RunSecret
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.weights.sleep import Sleep
from relax_hpc.weights.transport import call_timeout_s


def register_of(config: RunConfig, paths: RunPaths) -> Register:
    """Registers the engines that the run starts with, and those that were added."""
    extras = members.follow_extras(paths)
    return Register(
        paths,
        lambda: [*config.rollout_engines, *extras()],
        partial(_connect, config, RunSecret.read(paths.secret)),
    )


def lease_of(
    config: RunConfig, world: World, register: Register, context: TaskContext, events: EventWriter
) -> Lease:
    """Returns when the GPUs are free for the trainer. Collective."""
    if config.rollout_pool.placement != "actor":
        return OwnGpus()
    sleep = None
    if world.rank == 0:
        sleep = Sleep(
            register,
            context.attempt,
            timeout_s=config.weights.timeout_s,
            start_timeout_s=config.rollout_pool.start_timeout_s,
        )
    return SharedGpus(world, sleep, events)


def _connect(config: RunConfig, secret: RunSecret, member: Member) -> EngineClient:
    return EngineClient(
        member.url,
        secret.engine_token(member.id, member.start),
        timeout_s=call_timeout_s(config.weights.timeout_s),
        recompute=config.weights.kv_cache == "recompute",
        has_prefix_cache=not config.rollout_pool.args.get("disable_radix_cache"),
    )
