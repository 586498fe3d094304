"""The teachers: each writes logprobs of the prompts that it teaches to sidecars of its own."""

from collections.abc import Sequence

from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.config.teachers import columns_by_teacher, component_of
from relax_hpc.models.architecture import Architecture
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.role import Place, Role, Say
from relax_hpc.schema import COLUMNS
from relax_hpc.telemetry.events import EventWriter


def _places(config: RunConfig) -> Sequence[Place]:
    return [
        Place(
            component_of(name),
            teacher.megatron(config.actor, name).layout.world_size,
            teacher.resources,
            f"teachers.{name}",
            writes=COLUMNS[column].writer,
        )
        for (name, teacher), column in zip(
            config.teachers.items(), columns_by_teacher(config.teachers).values(), strict=True
        )
    ]


def _check(config: RunConfig, shape: Architecture, _say: Say) -> None:
    from relax_hpc.roles.teacher import check

    check.check_teachers(config, shape)


def _main(
    config: RunConfig, paths: RunPaths, context: TaskContext, world: World | None,
    events: EventWriter,
) -> None:  # fmt: skip
    from relax_hpc.roles.scorer import build
    from relax_hpc.roles.teacher.scoring import scoring_of

    assert world is not None
    name = next(name for name in config.teachers if component_of(name) == context.component)
    scoring = scoring_of(config, name)
    build.main(config, scoring, paths, world, context, events)


TEACHER = Role(
    "teacher",
    RunConfig,
    _main,
    _places,
    _check,
    is_one_world=True,
    work="logprobs of a teacher",
    profile="teacher",
)
