"""Lists the roles, for launching, inspecting and scaling runs."""

from collections.abc import Iterator, Sequence
from typing import Any

from relax_hpc import schema
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.roles.actor.role import ACTOR
from relax_hpc.roles.critic.role import CRITIC
from relax_hpc.roles.engine.role import ENGINE
from relax_hpc.roles.role import Place, Role
from relax_hpc.roles.rollout.role import ROLLOUT
from relax_hpc.roles.scorer.role import REFERENCE
from relax_hpc.roles.sft.role import SFT
from relax_hpc.roles.teacher.role import TEACHER

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


def _check_names(found: Sequence[Place]) -> None:
    seen = {role.joins for role in ROLES}
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


def sidecar_writers(config: JobConfig) -> dict[str, schema.Role]:
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
