"""Defines a role, as `table` declares it: its components, what they run, and its checks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from relax_hpc.config.run import JobConfig
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.facts import Facts
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.schema import ColumnWriter
from relax_hpc.sections import Resources

Side = Literal["sampling", "training"]
"""A part of a run that is a separate job with `launch.layout` separate."""


@dataclass(frozen=True, slots=True)
class Place:
    """One component: the resources that a role requests in a job."""

    component: str
    """Name in Slurm, logs, events and folders."""
    tasks: int
    resources: Resources
    """Resources in the job; a site profile fills in the rest."""
    section: str | None = None
    """Table of the job with these settings; a dot leads into a nested table. None: no table."""
    beside: str | None = None
    """Component whose nodes and GPUs it uses instead of its own."""
    own_beside: tuple[str, ...] = ()
    """Fields of `resources` that are its own even so."""
    is_apart: bool = False
    """Whether its tasks are independent: then each has a step of its own, which restarts alone."""
    writes: ColumnWriter | None = None
    """The writer whose bus columns it writes, if components of a role differ in that."""


Say = Callable[[str], None]
C = TypeVar("C", bound=JobConfig)
Main = Callable[[C, RunPaths, TaskContext, World | None, EventWriter], None]
"""Runs a task to its end. The world is None if its tasks work alone."""
Check = Callable[[C, Facts, Say], JobConfig | None]
"""Raises a ConfigError for a job that cannot work; says which checks remain for the job's start;
returns the job with counts filled in, if any."""


def no_place(_: JobConfig) -> Sequence[Place]:
    return ()


def nothing_to_check(_: JobConfig, _facts: Facts, _say: Say) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Role(Generic[C]):
    name: str
    job: type[C]
    main: Main[C]
    places: Callable[[C], Sequence[Place]] = no_place
    """Returns the components in a job; none if the role is not in that job."""
    check: Check[C] = nothing_to_check
    is_one_world: bool = False
    """Whether its ranks form one world, Megatron's; otherwise tasks work alone."""
    writes: ColumnWriter | None = None
    """The writer whose bus columns its rank 0 writes (`schema.COLUMNS`), if any."""
    profile: str | None = None
    """Table of site profiles with its resources; None: the whole site's."""
    is_scalable: bool = False
    """Whether it may hold nodes for engines added later."""
    side: Side = "training"
    """The side of a run with its components."""
    work: str = ""
    joins: str | None = None
    """Component of tasks that are started while the job runs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment of its tasks on GPUs; the submitter's environment takes precedence."""

    def places_in(self, config: JobConfig) -> Sequence[Place]:
        return self.places(config) if isinstance(config, self.job) else ()

    def writer_at(self, place: Place) -> ColumnWriter | None:
        return place.writes or self.writes

    def check_job(self, config: JobConfig, facts: Facts, say: Say) -> JobConfig:
        """Returns the job after `check`; unchanged if the role is for the other kind of job."""
        found = self.check(config, facts, say) if isinstance(config, self.job) else None
        return found or config

    def run(
        self, config: JobConfig, paths: RunPaths, context: TaskContext, world: World | None,
        events: EventWriter,
    ) -> None:  # fmt: skip
        assert isinstance(config, self.job)
        self.main(config, paths, context, world, events)


TRAINER_ENVIRONMENT = {
    # With several queues to the GPU a sum over ranks that is to overlap with a product may start
    # after it: Megatron insists on one.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Segments that grow keep packed micro-batches, each of another size, from cutting memory into
    # pieces.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""Variables that CUDA and torch read when a trainer starts."""


@dataclass(frozen=True, slots=True)
class ModelRank(Generic[C]):
    config: C
    paths: RunPaths
    world: World
    context: TaskContext
    events: EventWriter


def of_rank(run: Callable[[ModelRank[C]], None]) -> Main[C]:
    """Returns the `main` of a role whose ranks form a world."""

    def main(
        config: C, paths: RunPaths, context: TaskContext, world: World | None, events: EventWriter
    ) -> None:
        assert world is not None
        run(ModelRank(config, paths, world, context, events))

    return main
