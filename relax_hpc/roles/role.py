"""A role, as its folder declares it: where its tasks are, what they run, and what is checked first.

Nothing heavy is imported here or by who declares a role: `main` and `check` import their own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from relax_hpc.comm.world import World
from relax_hpc.config.run import JobConfig
from relax_hpc.models.architecture import Architecture
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.schema import Role as Writer
from relax_hpc.sections import Resources
from relax_hpc.telemetry.events import EventWriter

Restart = Literal["step", "none"]
"""Restart of a component one of whose tasks failed. step: all its tasks are started again in place,
up to `launch.max_restarts` times, then the job ends. none: the run goes on without that task."""
Side = Literal["sampling", "training"]
"""A part of a run that is a job of its own with `launch.layout` separate."""


@dataclass(frozen=True, slots=True)
class Place:
    """One component: what a role asks for in a job."""

    component: str
    """Name in Slurm, logs, events and folders."""
    tasks: int
    resources: Resources
    """Resources that the job says; a site profile fills in the rest."""
    section: str | None = None
    """Table of the job that says so; a dot leads into a table of it. None: no table does."""
    beside: str | None = None
    """Component whose nodes and GPUs it uses; it has none of its own then."""
    own_beside: tuple[str, ...] = ()
    """Fields of `resources` that are its own even so."""
    is_apart: bool = False
    """Whether its tasks know nothing of each other: then each has a step of its own, which starts
    again alone."""
    writes: Writer | None = None
    """The writer whose columns of the bus it writes, where components of a role differ in that."""


Say = Callable[[str], None]
C = TypeVar("C", bound=JobConfig)
Main = Callable[[C, RunPaths, TaskContext, World | None, EventWriter], None]
"""Runs a task to its end. The world is None where its tasks work alone."""
Check = Callable[[C, Architecture, Say], JobConfig | None]
"""Refuses what cannot work, with a ConfigError; tells what is left to be checked when the job
starts; returns the job with what was counted, if anything was."""


def no_place(_: JobConfig) -> Sequence[Place]:
    """Returns no place, for a role that is in no job's script."""
    return ()


def nothing_to_check(_: JobConfig, _shape: Architecture, _say: Say) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Role(Generic[C]):
    """A row of `table.ROLES`."""

    name: str
    job: type[C]
    """Kind of job that it may be in."""
    main: Main[C]
    places: Callable[[C], Sequence[Place]] = no_place
    """Components in a job; none if the role is not in that job."""
    check: Check[C] = nothing_to_check
    is_one_world: bool = False
    """Whether its ranks are one world, Megatron's; otherwise tasks work alone."""
    restart: Restart = "step"
    writes: Writer | None = None
    """The writer whose columns of the bus its rank 0 writes (`schema.COLUMNS`), if any."""
    profile: str | None = None
    """Table of site profiles with its resources; None: it takes those of the whole site."""
    is_scalable: bool = False
    """Whether it may hold nodes on which engines are added later."""
    side: Side = "training"
    """The side of a run that its components are on."""
    work: str = ""
    """The work that it does, in a few words."""
    joins: str | None = None
    """Component of its tasks that are started while the job runs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment of its tasks on GPUs, unless the submitter says otherwise."""

    def places_in(self, config: JobConfig) -> Sequence[Place]:
        return self.places(config) if isinstance(config, self.job) else ()

    def writer_at(self, place: Place) -> Writer | None:
        """The writer whose columns rank 0 of a component writes, if any."""
        return place.writes or self.writes

    def checked(self, config: JobConfig, shape: Architecture, say: Say) -> JobConfig:
        """The job after `check`; as it is if the role is of the other kind of job."""
        found = self.check(config, shape, say) if isinstance(config, self.job) else None
        return found or config

    def run(
        self, config: JobConfig, paths: RunPaths, context: TaskContext, world: World | None,
        events: EventWriter,
    ) -> None:  # fmt: skip
        """Runs a task to its end."""
        assert isinstance(config, self.job)
        self.main(config, paths, context, world, events)
