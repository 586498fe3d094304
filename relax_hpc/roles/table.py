"""Declares the roles, for launching, inspecting and scaling runs.

Nothing heavy is imported here: what a role runs and checks is imported when it does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from relax_hpc import schema
from relax_hpc.config.actor import columns_by_teacher, component_of
from relax_hpc.config.engines import OWN_UNDER_LEASE
from relax_hpc.config.engines import ROLLOUT as ROLLOUT_POOL
from relax_hpc.config.run import JobConfig, RunConfig, SftRunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.roles.context import Replay, TaskContext
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.role import TRAINER_ENVIRONMENT, ModelRank, Place, Role, Say, of_rank
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter

JOINS = "extra"
"""Component of engines added to a running job."""


def _places_of_rollout(config: RunConfig) -> Sequence[Place]:
    pool = config.rollout_pool
    place = Place(
        "rollout", pool.num_tasks, pool.resources, "engines.rollout", is_apart=pool.is_apart
    )
    if pool.placement == "own":
        return [place]
    return [replace(place, beside="actor", own_beside=OWN_UNDER_LEASE)]


def _check_rollout(config: RunConfig, facts: Facts, say: Say) -> RunConfig:
    from relax_hpc.roles.rollout import check

    return check.check(config, facts, say)


def _run_rollout(
    config: RunConfig, paths: RunPaths, context: TaskContext, _world: World | None,
    events: EventWriter,
) -> None:  # fmt: skip
    from relax_hpc.roles.rollout import build

    build.main(config, paths, context, events)


def _places_of_engines(config: RunConfig) -> Sequence[Place]:
    return [
        Place(name, pool.num_tasks, pool.resources, f"engines.{name}", is_apart=pool.is_apart)
        for name, pool in config.engines.items()
        if name != ROLLOUT_POOL
    ]


def _check_engines(config: RunConfig, facts: Facts, _say: Say) -> None:
    from relax_hpc.roles.engine import check

    check.check_pools(config, facts)


def _run_engine(
    config: RunConfig, paths: RunPaths, context: TaskContext, _world: World | None,
    events: EventWriter,
) -> None:  # fmt: skip
    from relax_hpc.roles.engine import loop

    main = loop.main_of_added if context.component == JOINS else loop.main
    main(config, paths, context, events)


def _places_of_actor(config: RunConfig | SftRunConfig) -> Sequence[Place]:
    return [Place("actor", config.actor.layout.world_size, config.actor.resources, "actor")]


def _check_actor(config: RunConfig, facts: Facts, say: Say) -> None:
    from relax_hpc.roles.training import check, gpu_memory

    check.check_trainer(config, facts.shape)
    gpu_memory.tell(config, facts.shape, say)


def _run_actor(rank: ModelRank[RunConfig]) -> None:
    from relax_hpc.roles.actor import build

    build.main(rank)


def _run_replay(rank: ModelRank[RunConfig]) -> None:
    from relax_hpc.roles.actor import replay

    asked = Replay.read(rank.paths.replayed)
    replay.main(rank, asked.run_dir, asked.step, asked.checkpoint)


def _check_sft(config: SftRunConfig, facts: Facts, say: Say) -> JobConfig:
    from relax_hpc.roles.sft import document_check
    from relax_hpc.roles.training import check, gpu_memory

    document_check.check_model(config, facts.shape)
    check.check_trainer(config, facts.shape)
    gpu_memory.tell(config, facts.shape, say)
    return document_check.check(config, facts.shape, say)


def _run_sft(rank: ModelRank[SftRunConfig]) -> None:
    from relax_hpc.roles.sft import loop

    loop.main(rank)


def _places_of_reference(config: RunConfig) -> Sequence[Place]:
    if config.reference.placement != "own":
        return ()
    ranks = config.reference_megatron.layout.world_size
    return [Place("reference", ranks, config.reference.resources, "reference")]


def _check_reference(config: RunConfig, facts: Facts, _say: Say) -> None:
    from relax_hpc.roles.training import check

    check.check_reference(config, facts)


def _run_reference(rank: ModelRank[RunConfig]) -> None:
    from relax_hpc.roles.scorer import build

    build.main(rank, build.of_reference(rank.config))


def _places_of_teachers(config: RunConfig) -> Sequence[Place]:
    return [
        Place(
            component_of(name),
            teacher.megatron(config.actor, name).layout.world_size,
            teacher.resources,
            f"teachers.{name}",
            writes=schema.COLUMNS[column].writer,
        )
        for (name, teacher), column in zip(
            config.teachers.items(), columns_by_teacher(config.teachers).values(), strict=True
        )
    ]


def _check_teachers(config: RunConfig, facts: Facts, _say: Say) -> None:
    from relax_hpc.roles.training import check

    check.check_teachers(config, facts)


def _run_teacher(rank: ModelRank[RunConfig]) -> None:
    from relax_hpc.roles.scorer import build

    build.main(rank, build.of_teacher(rank.config, rank.context.component))


def _places_of_critic(config: RunConfig) -> Sequence[Place]:
    if config.critic is None:
        return ()
    ranks = config.critic.megatron(config.actor).layout.world_size
    return [Place("critic", ranks, config.critic.resources, "critic")]


def _check_critic(config: RunConfig, facts: Facts, _say: Say) -> None:
    from relax_hpc.roles.training import check

    check.check_critic(config, facts)


def _run_critic(rank: ModelRank[RunConfig]) -> None:
    from relax_hpc.roles.critic import loop

    loop.main(rank)


ROLLOUT = Role(
    "rollout", RunConfig, _run_rollout, _places_of_rollout, _check_rollout,
    writes=schema.PRODUCER, work="samples and scores what is trained on", profile="rollout",
    is_scalable=True, side="sampling",
)  # fmt: skip
"""Keeps its engines, samples with them, and is the producer of the bus."""
ENGINE = Role(
    "engine", RunConfig, _run_engine, _places_of_engines, _check_engines, joins=JOINS,
    side="sampling",
)  # fmt: skip
"""Engines that sample for other tasks: of pools of their own, and added to rollout's."""
ACTOR = Role(
    "actor", RunConfig, of_rank(_run_actor), _places_of_actor, _check_actor, is_one_world=True,
    work="trains", profile="actor", environment=TRAINER_ENVIRONMENT,
)  # fmt: skip
"""Trains the policy on batches of the bus, and publishes its weights."""
SFT = Role(
    "sft", SftRunConfig, of_rank(_run_sft), _places_of_actor, _check_sft, is_one_world=True,
    work="trains on documents", profile="actor", environment=TRAINER_ENVIRONMENT,
)  # fmt: skip
"""The actor of a job that has neither rollout nor bus."""
REFERENCE = Role(
    "reference", RunConfig, of_rank(_run_reference), _places_of_reference, _check_reference,
    is_one_world=True, writes="reference", work="logprobs of another model", profile="reference",
)  # fmt: skip
TEACHER = Role(
    "teacher", RunConfig, of_rank(_run_teacher), _places_of_teachers, _check_teachers,
    is_one_world=True, work="logprobs of a teacher", profile="teacher",
)  # fmt: skip
"""Each teacher writes logprobs of the prompts that it teaches."""
CRITIC = Role(
    "critic", RunConfig, of_rank(_run_critic), _places_of_critic, _check_critic,
    is_one_world=True, writes="critic", profile="critic", environment=TRAINER_ENVIRONMENT,
)  # fmt: skip
"""Values committed rows, and learns from trained ones."""
REPLAY = Role(
    "replay", RunConfig, of_rank(_run_replay), is_one_world=True, work="trains a step again",
    environment=TRAINER_ENVIRONMENT,
)  # fmt: skip
"""Trains a step again from a run's shards. No job has it: `runs.replay` starts it."""

ROLES: tuple[Role[Any], ...] = (ROLLOUT, ENGINE, ACTOR, SFT, REFERENCE, TEACHER, CRITIC)
"""Roles in the order of their components in a job: the time limit of component 0 ends the whole
job, and without engines nothing works."""


def places(config: JobConfig) -> Iterator[tuple[Role[Any], Place]]:
    """Yields the components of a job and their roles; one beside another follows it.

    Raises:
        ConfigError: one is beside a component that the job does not have, or two have one name.
    """
    found = [(role, place) for role in ROLES for place in role.places_in(config)]
    _check_names([place for _, place in found])
    for role, place in found:
        if place.beside is None:
            yield role, place
            yield from ((r, guest) for r, guest in found if guest.beside == place.component)
    hosts = {place.component for _, place in found if place.beside is None}
    for _, place in found:
        if place.beside is not None and place.beside not in hosts:
            raise ConfigError(
                f"{place.component}: is to run beside {place.beside}, which has no nodes of its "
                "own in this job; give it a place of its own"
            )


def count_gpus(config: JobConfig) -> int:
    """Counts the GPUs of a submitted job, whose site profile may be gone; without those of engines
    added later."""
    hosts = (place.resources for _, place in places(config) if place.beside is None)
    return sum(each.gpus_per_node * each.nodes for each in hosts)


def _check_names(found: Sequence[Place]) -> None:
    seen = {REPLAY.name, *(role.joins for role in ROLES)}
    for place in found:
        if place.component in seen:
            key = place.section or place.component
            raise ConfigError(
                f"{key}: another component is called {place.component}; choose another name"
            )
        seen.add(place.component)


def role_of(config: JobConfig, component: str) -> Role[Any]:
    """Returns the role of a component.

    Raises:
        ConfigError: the job has no such component.
    """
    known = {place.component: role for role, place in places(config)}
    known |= {role.joins: role for role in ROLES if role.joins}
    if component == REPLAY.name:
        return REPLAY
    if component not in known:
        raise ConfigError(
            f"component {component!r}: this version runs {', '.join(known)} in such a job"
        )
    return known[component]


def check_columns(config: JobConfig) -> None:
    """Raises:
    ConfigError: the algorithm needs a column that nobody in this job writes."""
    if not isinstance(config, RunConfig):
        return
    written = {role.writer_at(place) for role in ROLES for place in role.places_in(config)}
    written.add("reference")  # the actor's own, maybe
    for column, key in config.algorithm.needs.columns.items():
        writer = schema.COLUMNS[column].writer
        if writer not in written:
            raise ConfigError(
                f"{key}: needs the column {column}, which the role {writer} writes; add it to the "
                "job, or choose another algorithm.preset"
            )


def sidecar_writers(config: JobConfig) -> dict[str, schema.ColumnWriter]:
    """Returns the names of writers that add columns to the producers' shards, with their roles."""
    return {
        f"{place.component}-0": writer
        for role, place in places(config)
        if (writer := role.writer_at(place)) and writer != schema.PRODUCER
    }


def profile_tables() -> list[str]:
    return list(dict.fromkeys(role.profile for role in ROLES if role.profile))


def scalable() -> list[str]:
    """Returns roles that may hold nodes for engines added later."""
    return [role.name for role in ROLES if role.is_scalable]


def joining() -> list[str]:
    """Returns components of tasks that are started while the job runs."""
    return [role.joins for role in ROLES if role.joins]
