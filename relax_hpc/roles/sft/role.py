"""Declares supervised fine-tuning: the actor of a job that has neither rollout nor bus."""

from collections.abc import Callable, Sequence

from relax_hpc.config.run import JobConfig, SftRunConfig
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.role import TRAINER_ENVIRONMENT, ModelRank, Place, Role, Say, main_of_rank


def _places(config: SftRunConfig) -> Sequence[Place]:
    return [Place("actor", config.actor.layout.world_size, config.actor.resources, "actor")]


def _check(config: SftRunConfig, facts: Facts, say: Say) -> JobConfig:
    from relax_hpc.roles.sft import document_check
    from relax_hpc.roles.training import check, gpu_memory

    document_check.check_model(config, facts.shape)
    check.check_trainer(config)
    gpu_memory.tell(config, facts.shape, say)
    return document_check.check(config, say)


def _main() -> Callable[[ModelRank[SftRunConfig]], None]:
    from relax_hpc.roles.sft import build

    return build.main


SFT = Role(
    "sft",
    SftRunConfig,
    main_of_rank(_main),
    _places,
    _check,
    is_one_world=True,
    work="trains on documents",
    profile="actor",
    environment=TRAINER_ENVIRONMENT,
)
