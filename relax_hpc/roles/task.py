"""Where a task begins: reads the run directory, builds the parts of its role, runs the loop."""

import logging
import resource
from collections.abc import Callable
from pathlib import Path

from relax_hpc.comm.world import World, connect
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.config.sft import SftRunConfig
from relax_hpc.engines import optional_packages
from relax_hpc.errors import ConfigError
from relax_hpc.job_file import read_resolved
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.run_secret import RunSecret
from relax_hpc.telemetry import logs
from relax_hpc.telemetry.events import EventWriter

log = logging.getLogger(__name__)

RoleMain = Callable[[JobConfig, RunPaths, TaskContext, str, EventWriter], None]


def run(run_dir: Path, context: TaskContext, bootstrap: str) -> None:
    """Runs one task until its role is done. What it raises has been logged and recorded.

    Raises:
        ConfigError: not a run directory, or an unknown role.
    """
    paths = RunPaths(run_dir)
    config = read_resolved(paths.config)
    logs.setup(context.role, context.rank, paths.log(context.role, str(context.rank)))
    with EventWriter(
        paths.events(context.role, context.rank), context.role, context.rank
    ) as events:
        events.emit("start", attempt=context.attempt, start=context.start, node=context.node)
        allow_open_files()
        optional_packages.hush()
        try:
            _role(context.role)(config, paths, context, bootstrap, events)
        except Exception as error:
            events.emit("error", message=f"{type(error).__name__}: {error}")
            log.exception("%s failed: %s: %s", context.name, type(error).__name__, error)
            raise


def allow_open_files() -> None:
    """Takes as many descriptors as this process may have: rank 0 follows a log per producer."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _role(role: str) -> RoleMain:
    """The role's own imports happen here: a rollout task needs no Megatron, an actor no engine."""
    if role == "rollout":
        return _rollout
    if role == "actor":
        return _actor
    if role == "reference":
        return _reference
    if role == "extra":
        return _extra
    raise ConfigError(f"role {role!r}: this version runs rollout, actor, reference and extra")


def _rollout(
    config: JobConfig, paths: RunPaths, context: TaskContext, bootstrap: str, events: EventWriter
) -> None:
    from relax_hpc.roles.rollout import build as rollout_task

    assert isinstance(config, RunConfig)
    if bootstrap != "files":  # tasks of this role work alone; joining proves the world's size
        world = connect(
            bootstrap, role=context.role, rank=context.rank, size=context.size,
            rendezvous=paths.control, secret=RunSecret.read(paths.secret),
        )  # fmt: skip
        events.emit("world", kind=type(world).__name__, size=world.size)
    rollout_task.main(config, paths, context, events)


def _extra(
    config: JobConfig, paths: RunPaths, context: TaskContext, bootstrap: str, events: EventWriter
) -> None:
    from relax_hpc.roles.engine import added as extra_engine

    assert isinstance(config, RunConfig)
    extra_engine.main(config, paths, context, events)


def _actor(
    config: JobConfig, paths: RunPaths, context: TaskContext, bootstrap: str, events: EventWriter
) -> None:
    world = _join(config, paths, context, bootstrap, events)
    if isinstance(config, SftRunConfig):
        from relax_hpc.roles.sft import build as sft_task

        sft_task.main(config, paths, world, context.local_rank, events)
    elif isinstance(config, RunConfig):
        from relax_hpc.roles.actor import build as actor_task

        actor_task.main(config, paths, world, context, events)


def _reference(
    config: JobConfig, paths: RunPaths, context: TaskContext, bootstrap: str, events: EventWriter
) -> None:
    from relax_hpc.roles.scorer import build as logprobs_task

    assert isinstance(config, RunConfig)
    world = _join(config, paths, context, bootstrap, events)
    logprobs_task.main(config, paths, world, context, events)


def _join(
    config: JobConfig, paths: RunPaths, context: TaskContext, bootstrap: str, events: EventWriter
) -> World:
    """The world of the component's ranks, which are Megatron's."""
    from relax_hpc.engines.megatron import cpu

    cpu.install()
    # Others outlast rank 0, which gives up on rollout and says whom it waited for.
    world = connect(
        bootstrap,
        role=context.role,
        rank=context.rank,
        size=context.size,
        rendezvous=paths.rendezvous(context.start_id),
        secret=RunSecret.read(paths.secret),
        timeout_s=config.launch.peer_timeout_s + 60,
    )
    events.emit("world", kind=type(world).__name__, size=world.size)
    return world
