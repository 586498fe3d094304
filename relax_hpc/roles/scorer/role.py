"""The reference as a component of its own: writes logprobs of what is committed to sidecars."""

from collections.abc import Sequence

from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.models.architecture import Architecture
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.role import Place, Role, Say
from relax_hpc.telemetry.events import EventWriter


def _places(config: RunConfig) -> Sequence[Place]:
    if config.reference.placement != "own":
        return ()
    ranks = config.reference_megatron.layout.world_size
    return [Place("reference", ranks, config.reference.resources, "reference")]


def _check(config: RunConfig, shape: Architecture, _say: Say) -> None:
    from relax_hpc.roles.scorer import check

    check.check_reference(config, shape)


def _main(
    config: RunConfig, paths: RunPaths, context: TaskContext, world: World | None,
    events: EventWriter,
) -> None:  # fmt: skip
    from relax_hpc.roles.scorer import build

    assert world is not None
    build.main(config, build.of_reference(config), paths, world, context, events)


REFERENCE = Role(
    "reference",
    RunConfig,
    _main,
    _places,
    _check,
    is_one_world=True,
    writes="reference",
    work="logprobs of another model",
    profile="reference",
)
