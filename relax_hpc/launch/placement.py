"""Which components a run has, and what each asks Slurm for. Pure: nothing is looked up."""

from dataclasses import dataclass
from typing import Literal

from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.config.sections import Resources
from relax_hpc.errors import ConfigError
from relax_hpc.launch import profiles

Bootstrap = Literal["mpi", "mpi_job", "files"]


@dataclass(frozen=True, slots=True)
class Component:
    """One component of the heterogeneous job: the tasks of one role."""

    role: str
    tasks: int
    resources: Resources
    bootstrap: Bootstrap = "files"
    """How its tasks find each other."""

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

    Rollout, if there is one, comes first: the time limit of component 0 ends the whole job, and
    without engines nothing goes on.

    Raises:
        ConfigError: tasks do not divide over the nodes, or MPI is wanted but not said which.
    """
    profile = profiles.load(config.launch.profile)
    components = []
    if isinstance(config, RunConfig):
        resources = profile.resources("rollout", config.rollout.resources)
        components.append(_component(config, "rollout", config.rollout.num_tasks, resources))
    resources = profile.resources("actor", config.actor.resources)
    components.append(_component(config, "actor", config.actor.world_size, resources))
    if isinstance(config, RunConfig) and config.reference.placement == "own":
        resources = profile.resources("reference", config.reference.resources)
        ranks = config.reference.world_size
        components.append(_component(config, "reference", ranks, resources))
    return components


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
