"""Declares the critic: it values committed rows, and learns from trained ones."""

from collections.abc import Callable, Sequence

from relax_hpc.config.run import RunConfig
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.role import TRAINER_ENVIRONMENT, ModelRank, Place, Role, Say, main_of_rank


def _places(config: RunConfig) -> Sequence[Place]:
    if config.critic is None:
        return ()
    ranks = config.critic.megatron(config.actor).layout.world_size
    return [Place("critic", ranks, config.critic.resources, "critic")]


def _check(config: RunConfig, facts: Facts, _say: Say) -> None:
    from relax_hpc.roles.training import check

    check.check_critic(config, facts)


def _main() -> Callable[[ModelRank[RunConfig]], None]:
    from relax_hpc.roles.critic import build

    return build.main


CRITIC = Role(
    "critic",
    RunConfig,
    main_of_rank(_main),
    _places,
    _check,
    is_one_world=True,
    writes="critic",
    profile="critic",
    environment=TRAINER_ENVIRONMENT,
)
