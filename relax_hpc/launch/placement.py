"""Which components a run has, and what each asks Slurm for. Pure: nothing is looked up."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from relax_hpc.config.run import OWN_UNDER_LEASE, JobConfig, RunConfig
from relax_hpc.config.sections import Resources
from relax_hpc.errors import ConfigError
from relax_hpc.launch import profiles

Bootstrap = Literal["mpi", "mpi_job", "files"]


@dataclass(frozen=True, slots=True)
class Component:
    """The tasks of one role, and as a rule one component of the heterogeneous job."""

    role: str
    tasks: int
    resources: Resources
    bootstrap: Bootstrap = "files"
    """How its tasks find each other."""
    on: str | None = None
    """Role of the component whose nodes and GPUs it uses; it has none of its own then."""

    @property
    def nodes(self) -> int:
        return self.resources.nodes

    @property
    def held_nodes(self) -> int:
        """What it asks Slurm for; those beyond `nodes` are idle until engines are added."""
        return self.resources.max_nodes or self.nodes

    @property
    def tasks_per_node(self) -> int:
        return self.tasks // self.nodes


def place(config: JobConfig) -> list[Component]:
    """The components of a run, in the order of the heterogeneous job.

    Rollout, if it is a component of its own, comes first: the time limit of component 0 ends the
    whole job, and without engines nothing goes on.

    Raises:
        ConfigError: tasks do not divide over the nodes, or MPI is wanted but not said which.
    """
    profile = profiles.load(config.launch.profile)
    components = []
    if isinstance(config, RunConfig) and config.rollout.placement == "own":
        resources = profile.resources("rollout", config.rollout.resources)
        components.append(_component(config, "rollout", config.rollout.num_tasks, resources))
    resources = profile.resources("actor", config.actor.resources)
    components.append(_component(config, "actor", config.actor.world_size, resources))
    if isinstance(config, RunConfig) and config.rollout.placement == "actor":
        components.append(_beside_actor(config, components[-1]))
    if isinstance(config, RunConfig) and config.reference.placement == "own":
        resources = profile.resources("reference", config.reference.resources)
        ranks = config.reference.world_size
        components.append(_component(config, "reference", ranks, resources))
    return components


def _beside_actor(config: RunConfig, actor: Component) -> Component:
    """Rollout on the actor's nodes; what it runs may be its own, what Slurm is asked for is not."""
    its = {name: getattr(config.rollout.resources, name) for name in OWN_UNDER_LEASE}
    said = {name: value for name, value in its.items() if value}
    resources = actor.resources.model_copy(update=said)
    rollout = _component(config, "rollout", config.rollout.num_tasks, resources)
    return replace(rollout, on=actor.role, bootstrap="files")


def groups(components: Sequence[Component]) -> list[int]:
    """For each which component of the heterogeneous job it runs in."""
    hosts = [component.role for component in components if component.on is None]
    return [hosts.index(component.on or component.role) for component in components]


def _component(config: JobConfig, role: str, tasks: int, resources: Resources) -> Component:
    if tasks % resources.nodes:
        raise ConfigError(
            f"{role}.resources.nodes = {resources.nodes}: {tasks} tasks do not divide over them; "
            f"use a divisor of {tasks}"
        )
    wanted = config.launch.bootstrap
    if wanted in ("mpi", "mpi_job") and resources.mpi is None:
        raise ConfigError(
            f"launch.bootstrap = {wanted!r}: {role}.resources.mpi is not set; "
            "use pmix for Open MPI, pmi2 for MPICH (srun --mpi=list)"
        )
    if wanted == "mpi_job" and resources.mpi != "pmix":  # pmi2 hangs in some layouts of nodes
        raise ConfigError(
            f"launch.bootstrap = 'mpi_job': {role}.resources.mpi = {resources.mpi!r}; one world "
            "over several components needs 'pmix'"
        )
    if wanted == "auto":
        wanted = "files" if resources.mpi is None else "mpi"
    return Component(role, tasks, resources, wanted)
