"""The critic: writes values of what is committed, and learns from what is trained on."""

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
    if config.critic is None:
        return ()
    ranks = config.critic.megatron(config.actor).layout.world_size
    return [Place("critic", ranks, config.critic.resources, "critic")]


def _check(config: RunConfig, shape: Architecture, _say: Say) -> None:
    from relax_hpc.roles.critic import check

    check.check_critic(config, shape)


def _main(
    config: RunConfig, paths: RunPaths, context: TaskContext, world: World | None,
    events: EventWriter,
) -> None:  # fmt: skip
    from relax_hpc.roles.critic import build

    assert world is not None
    build.main(config, paths, world, context, events)


CRITIC = Role(
    "critic",
    RunConfig,
    _main,
    _places,
    _check,
    is_one_world=True,
    writes="critic",
    profile="critic",
    environment=TRAINER_ENVIRONMENT,
)
