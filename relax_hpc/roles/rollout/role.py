"""Declares rollout: it keeps engines, samples with them, and is the producer of the bus."""

from collections.abc import Sequence
from dataclasses import replace

from relax_hpc import schema
from relax_hpc.config.engines import OWN_UNDER_LEASE
from relax_hpc.config.run import RunConfig
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.role import Place, Role, Say
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter


def _places(config: RunConfig) -> Sequence[Place]:
    pool = config.rollout_pool
    place = Place(
        "rollout", pool.num_tasks, pool.resources, "engines.rollout", is_apart=pool.is_apart
    )
    if pool.placement == "own":
        return [place]
    return [replace(place, beside="actor", own_beside=OWN_UNDER_LEASE)]


def _check(config: RunConfig, facts: Facts, say: Say) -> RunConfig:
    from relax_hpc.roles.rollout import check

    return check.check(config, facts.shape, say)


def _main(
    config: RunConfig, paths: RunPaths, context: TaskContext, _world: World | None,
    events: EventWriter,
) -> None:  # fmt: skip
    from relax_hpc.roles.rollout import build

    build.main(config, paths, context, events)


ROLLOUT = Role(
    "rollout",
    RunConfig,
    _main,
    _places,
    _check,
    writes=schema.PRODUCER,
    work="samples and scores what is trained on",
    profile="rollout",
    is_scalable=True,
    side="sampling",
)
