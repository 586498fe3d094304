"""The actor: trains the policy on batches of the bus, and publishes its weights."""

from collections.abc import Sequence

from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.models.architecture import Architecture
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.role import Place, Role, Say
from relax_hpc.roles.training.environment import TRAINER_ENVIRONMENT
from relax_hpc.telemetry.events import EventWriter


def _places(config: RunConfig) -> Sequence[Place]:
    return [Place("actor", config.actor.layout.world_size, config.actor.resources, "actor")]


def _check(config: RunConfig, shape: Architecture, say: Say) -> None:
    from relax_hpc.roles.training import check, gpu_memory

    check.check_trainer(config)
    gpu_memory.tell(config, shape, say)


def _main(
    config: RunConfig, paths: RunPaths, context: TaskContext, world: World | None,
    events: EventWriter,
) -> None:  # fmt: skip
    from relax_hpc.roles.actor import build

    assert world is not None
    build.main(config, paths, world, context, events)


ACTOR = Role(
    "actor",
    RunConfig,
    _main,
    _places,
    _check,
    is_one_world=True,
    work="trains",
    profile="actor",
    environment=TRAINER_ENVIRONMENT,
)
