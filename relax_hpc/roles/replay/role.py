"""Replay: trains a step again that a run has trained, from its shards. No job has this role."""

from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.role import Role
from relax_hpc.roles.training.environment import TRAINER_ENVIRONMENT
from relax_hpc.telemetry.events import EventWriter

COMPONENT = "replay"
"""Name of the component that a replay has in place of the actor."""


def _main(
    config: RunConfig, paths: RunPaths, context: TaskContext, world: World | None,
    events: EventWriter,
) -> None:  # fmt: skip
    from relax_hpc.roles.replay import build

    assert world is not None
    build.main(config, paths, world, context, events)


REPLAY = Role(
    COMPONENT,
    RunConfig,
    _main,
    is_one_world=True,
    work="trains a step again",
    environment=TRAINER_ENVIRONMENT,
)
