"""Engines that sample for others: of pools of their own, and those that were added to rollout's.

The engines that rollout starts with are kept by its own tasks.
"""

from collections.abc import Sequence

from relax_hpc.comm.world import World
from relax_hpc.config.engines import ROLLOUT
from relax_hpc.config.run import RunConfig
from relax_hpc.models.architecture import Architecture
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.role import Place, Role, Say
from relax_hpc.telemetry.events import EventWriter

JOINS = "extra"
"""Component of engines that are added to a running job."""


def _places(config: RunConfig) -> Sequence[Place]:
    return [
        Place(name, pool.num_tasks, pool.resources, f"engines.{name}", is_apart=pool.is_apart)
        for name, pool in config.engines.items()
        if name != ROLLOUT
    ]


def _check(config: RunConfig, _shape: Architecture, _say: Say) -> None:
    from relax_hpc.roles.engine import check

    check.check_pools(config)


def _main(
    config: RunConfig, paths: RunPaths, context: TaskContext, _world: World | None,
    events: EventWriter,
) -> None:  # fmt: skip
    from relax_hpc.roles.engine import added, loop

    main = added.main if context.component == JOINS else loop.main
    main(config, paths, context, events)


ENGINE = Role("engine", RunConfig, _main, _places, _check, joins=JOINS, side="sampling")
