"""Declares engines that sample for other tasks: of pools of their own, and added to rollout's.

Rollout's initial engines are kept by rollout tasks.
"""

from collections.abc import Sequence

from relax_hpc.config.engines import ROLLOUT
from relax_hpc.config.run import RunConfig
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.role import Place, Role, Say
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter

JOINS = "extra"
"""Component of engines added to a running job."""


def _places(config: RunConfig) -> Sequence[Place]:
    return [
        Place(name, pool.num_tasks, pool.resources, f"engines.{name}", is_apart=pool.is_apart)
        for name, pool in config.engines.items()
        if name != ROLLOUT
    ]


def _check(config: RunConfig, facts: Facts, _say: Say) -> None:
    from relax_hpc.roles.engine import check

    check.check_pools(config, facts)


def _main(
    config: RunConfig, paths: RunPaths, context: TaskContext, _world: World | None,
    events: EventWriter,
) -> None:  # fmt: skip
    from relax_hpc.roles.engine import loop

    main = loop.main_of_added if context.component == JOINS else loop.main
    main(config, paths, context, events)


ENGINE = Role("engine", RunConfig, _main, _places, _check, joins=JOINS, side="sampling")
