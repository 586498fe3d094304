"""An engine that samples for others: those of the core job are kept by rollout's tasks."""

from relax_hpc.comm.world import World
from relax_hpc.config.run import JobConfig, RunConfig
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.role import Role
from relax_hpc.telemetry.events import EventWriter


def _main(
    config: JobConfig, paths: RunPaths, context: TaskContext, _world: World | None,
    events: EventWriter,
) -> None:  # fmt: skip
    from relax_hpc.roles.engine import added

    assert isinstance(config, RunConfig)
    added.main(config, paths, context, events)


ENGINE = Role("engine", _main, restart="none", joins="extra")
