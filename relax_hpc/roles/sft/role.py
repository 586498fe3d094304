"""Supervised fine-tuning: the actor of a job that has neither rollout nor bus."""

from collections.abc import Sequence

from relax_hpc.comm.world import World
from relax_hpc.config.run import JobConfig
from relax_hpc.config.sft import SftRunConfig
from relax_hpc.models.architecture import Architecture
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.role import Place, Role, Say
from relax_hpc.roles.training.environment import TRAINER_ENVIRONMENT
from relax_hpc.telemetry.events import EventWriter


def _places(config: SftRunConfig) -> Sequence[Place]:
    return [Place("actor", config.actor.layout.world_size, config.actor.resources, "actor")]


def _check(config: SftRunConfig, shape: Architecture, say: Say) -> JobConfig:
    from relax_hpc.roles.sft import document_check
    from relax_hpc.roles.training import check, gpu_memory

    document_check.check_model(config, shape)
    check.check_trainer(config)
    gpu_memory.tell(config, shape, say)
    return document_check.check(config, say)


def _main(
    config: SftRunConfig, paths: RunPaths, context: TaskContext, world: World | None,
    events: EventWriter,
) -> None:  # fmt: skip
    from relax_hpc.roles.sft import build

    assert world is not None
    build.main(config, paths, world, context, events)


SFT = Role(
    "sft",
    SftRunConfig,
    _main,
    _places,
    _check,
    is_one_world=True,
    work="trains on documents",
    profile="actor",
    environment=TRAINER_ENVIRONMENT,
)
