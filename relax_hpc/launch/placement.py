"""The components of a run, and the requests of each to Slurm. Pure: nothing is looked up."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from relax_hpc.config.run import JobConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch import interpreter, profiles
from relax_hpc.roles import table
from relax_hpc.roles.role import Place, Role, Side
from relax_hpc.sections import Resources

MOST_STEPS = 128
"""Steps of one component, each an srun on the first node; of more nodes several are in a step."""
Bootstrap = Literal["mpi", "mpi_job", "files"]


@dataclass(frozen=True, slots=True)
class Component:
    """Tasks of one role, and as a rule one component of the heterogeneous job."""

    name: str
    tasks: int
    resources: Resources
    bootstrap: Bootstrap = "files"
    """Way in which its tasks find each other."""
    on: str | None = None
    """The component whose nodes and GPUs it uses; it has none of its own then."""
    section: str | None = None
    """Table of the job that says its resources, if one does."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment of its tasks on GPUs, unless the submitter says otherwise."""
    is_scalable: bool = False
    """Whether it may hold nodes on which engines are added later."""
    side: Side = "training"
    """The job that it is in, where the sides of a run are two."""
    is_apart: bool = False
    """Whether its tasks on one node know nothing of those on others."""

    @property
    def key(self) -> str:
        """Name of its resources in messages."""
        return f"{self.section or self.name}.resources"

    @property
    def nodes(self) -> int:
        return self.resources.nodes

    @property
    def held_nodes(self) -> int:
        """Nodes that it asks Slurm for; those beyond `nodes` are idle until engines are added."""
        return self.resources.max_nodes or self.nodes

    @property
    def tasks_per_node(self) -> int:
        return self.tasks // self.nodes

    @property
    def nodes_of_steps(self) -> list[range]:
        """Nodes of each of its Slurm steps, by their places among its own."""
        places, size = range(self.nodes), self.nodes
        if self.is_apart and self.bootstrap == "files" and self.on is None:
            size = math.ceil(self.nodes / MOST_STEPS)
        return [places[first : first + size] for first in places[::size]]

    def ranks_on(self, nodes: range) -> range:
        """Ranks of its tasks on some of its nodes."""
        return range(nodes.start * self.tasks_per_node, nodes.stop * self.tasks_per_node)


def place(config: JobConfig) -> list[Component]:
    """The components of a run, in the order of the heterogeneous job.

    Raises:
        ConfigError: tasks do not divide over the nodes, or MPI is wanted but not said which.
    """
    profile = profiles.load(config.launch.profile)
    found: dict[str, Component] = {}
    for role, asked in table.places(config):
        assert role.restart == "step", "the script starts failed steps again"
        if asked.beside is None:
            resources = profile.resources(role.profile, config.resources, asked.resources)
            resources = interpreter.found_anywhere(resources)
            found[asked.component] = _component(config, role, asked, resources)
            _check_apart(config, found[asked.component])
        else:
            guest = _component(config, role, asked, _beside(found[asked.beside], asked))
            found[asked.component] = replace(guest, on=asked.beside, bootstrap="files")
    return list(found.values())


def _check_apart(config: JobConfig, component: Component) -> None:
    held = component.resources.max_nodes
    if held is not None and config.launch.layout == "separate":
        raise ConfigError(
            f"{component.key}.max_nodes = {held}: with launch.layout = 'separate' no engines are "
            "added; remove it, or set engines.rollout.count"
        )
    if config.launch.layout == "separate" and "--no-requeue" in component.resources.sbatch:
        raise ConfigError(
            f"{component.key}.sbatch = {component.resources.sbatch}: with launch.layout = "
            "'separate' an idle job is requeued, to give its nodes back; remove --no-requeue"
        )


def sides(config: JobConfig, components: Sequence[Component]) -> list[list[Component]]:
    """Returns the components of each job of a run, that of rollout first."""
    if config.launch.layout == "hetjob":
        return [list(components)]
    return [[c for c in components if c.side == side] for side in get_args(Side)]


def _beside(host: Component, asked: Place) -> Resources:
    """Returns the host's resources, which Slurm is asked for, with those that are the component's
    own."""
    own = {name: getattr(asked.resources, name) for name in asked.own_beside}
    said = {name: value for name, value in own.items() if value}
    return host.resources.model_copy(update=said)


def groups(components: Sequence[Component]) -> list[int]:
    """Returns for each which component of the heterogeneous job it runs in."""
    hosts = [component.name for component in components if component.on is None]
    return [hosts.index(component.on or component.name) for component in components]


def _component(config: JobConfig, role: Role[Any], asked: Place, resources: Resources) -> Component:
    made = Component(
        asked.component, asked.tasks, resources, "files", None,
        asked.section, role.environment, role.is_scalable, role.side, asked.is_apart,
    )  # fmt: skip
    key, tasks = made.key, made.tasks
    if tasks % resources.nodes:
        raise ConfigError(
            f"{key}.nodes = {resources.nodes}: {tasks} tasks do not divide over them; "
            f"use a divisor of {tasks}"
        )
    wanted = config.launch.bootstrap
    if wanted in ("mpi", "mpi_job") and resources.mpi is None:
        raise ConfigError(
            f"launch.bootstrap = {wanted!r}: {key}.mpi is not set; "
            "use pmix for Open MPI, pmi2 for MPICH (srun --mpi=list)"
        )
    if wanted == "mpi_job" and resources.mpi != "pmix":  # pmi2 hangs in some layouts of nodes
        raise ConfigError(
            f"launch.bootstrap = 'mpi_job': {key}.mpi = {resources.mpi!r}; one world "
            "over several components needs 'pmix'"
        )
    if wanted == "auto":  # who has a step per node has no world over them
        is_apart = asked.is_apart and resources.nodes > 1
        wanted = "files" if resources.mpi is None or is_apart else "mpi"
    return replace(made, bootstrap=wanted)
