"""Declares the teachers: each writes logprobs of the prompts that it teaches to its sidecars."""

from collections.abc import Callable, Sequence

from relax_hpc.config.actor import columns_by_teacher, component_of
from relax_hpc.config.run import RunConfig
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.role import ModelRank, Place, Role, Say, main_of_rank
from relax_hpc.schema import COLUMNS


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


def _check(config: RunConfig, facts: Facts, _say: Say) -> None:
    from relax_hpc.roles.training import check

    check.check_teachers(config, facts)


def _main() -> Callable[[ModelRank[RunConfig]], None]:
    from relax_hpc.roles.scorer import build
    from relax_hpc.roles.teacher.prompts import make_privileged_prompts
    from relax_hpc.roles.teacher.routing import taught_by

    def main(rank: ModelRank[RunConfig]) -> None:
        config, component = rank.config, rank.context.component
        name = next(name for name in config.teachers if component_of(name) == component)
        teacher, prompts = config.teachers[name], make_privileged_prompts(config, name)
        scoring = build.Scoring(
            teacher.model(config.model),
            teacher.megatron(config.actor, name),
            columns_by_teacher(config.teachers)[name],
            build.ScoringView(taught_by(config, name), prompts.__getitem__ if prompts else None),
        )
        build.main(rank, scoring)

    return main


TEACHER = Role(
    "teacher",
    RunConfig,
    main_of_rank(_main),
    _places,
    _check,
    is_one_world=True,
    work="logprobs of a teacher",
    profile="teacher",
)
