"""Starts a task: reads the run directory, builds the parts of its role, runs the loop."""

import logging
import os
import resource
from pathlib import Path
from typing import Any

from relax_hpc.config.job_file import read_resolved
from relax_hpc.config.run import JobConfig
from relax_hpc.roles import table
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.role import Role
from relax_hpc.roles.training import gpu_memory
from relax_hpc.runtime import devices, kernel_cache
from relax_hpc.runtime.comm import address
from relax_hpc.runtime.comm.world import World, abandon, connect
from relax_hpc.runtime.files import storage
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import logs
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.watchdog import watch

log = logging.getLogger(__name__)


def run(run_dir: Path, context: TaskContext, bootstrap: str) -> None:
    """Runs one task until its role is done. Errors that it raises have been logged and recorded.

    Args:
        bootstrap: how the tasks of its component find each other.

    Raises:
        ConfigError: not a run directory, or a component that its job does not have.
    """
    paths, name = RunPaths(run_dir), context.component
    config = read_resolved(paths.config)
    storage.settle(config.launch.advanced.peer_timeout_s, reserve=paths.reserve)
    logs.setup(name, context.rank, paths.log(name, str(context.rank)))
    with EventWriter(paths.events(name, context.rank), name, context.rank) as events:
        events.emit(
            "start", attempt=context.attempt, start=context.start, node=context.node,
            step_from=context.step_from,
        )  # fmt: skip
        allow_open_files()
        devices.hush()
        try:
            address.settle(config.launch.advanced.network)
            role = table.role_of(config, name)
            kernel_cache.keep(os.environ, config.launch.advanced.kernel_cache)
            with watch(
                paths.root, name, context.rank, context.start_id, context.node,
                is_one_world=role.is_one_world,
                least_s=config.launch.advanced.hang_timeout_s,
                most_s=config.launch.advanced.peer_timeout_s,
            ):  # fmt: skip
                start(role, config, paths, context, bootstrap, events)
        except Exception as error:
            events.emit("error", message=f"{type(error).__name__}: {error}")
            log.exception("%s failed: %s: %s", context.name, type(error).__name__, error)
            abandon()
            raise


def allow_open_files() -> None:
    """Raises the limit of open files to the hard limit: rank 0 follows a log per producer."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def start(
    role: Role[Any],
    config: JobConfig,
    paths: RunPaths,
    context: TaskContext,
    bootstrap: str,
    events: EventWriter,
) -> None:
    """Joins the task to the others of its component, if they form a world, and runs its role."""
    world = None
    # Tasks that work alone join where MPI started them: it proves the size of the world.
    if role.is_one_world or bootstrap != "files":
        world = _join(role, config, paths, context, bootstrap)
        events.emit("world", kind=type(world).__name__, size=world.size)
    try:
        role.run(config, paths, context, world, events)
    except Exception as error:
        if role.is_one_world and (found := gpu_memory.explain(error, config, context.component)):
            raise found from error
        raise


def _join(
    role: Role[Any], config: JobConfig, paths: RunPaths, context: TaskContext, bootstrap: str
) -> World:
    if role.is_one_world:
        from relax_hpc.trainer.megatron import cpu

        cpu.install()
    # Others outlast rank 0, which gives up on rollout and says whom it waited for.
    return connect(
        bootstrap,
        role=context.component,
        rank=context.rank,
        size=context.size,
        rendezvous=paths.rendezvous(context.start_id),
        secret=RunSecret.read(paths.secret),
        timeout_s=config.launch.advanced.peer_timeout_s + 60,
    )
