"""Declares the reference as a component: it writes logprobs of committed rows to sidecars."""

from collections.abc import Callable, Sequence

from relax_hpc.config.run import RunConfig
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.role import ModelRank, Place, Role, Say, main_of_rank


def _places(config: RunConfig) -> Sequence[Place]:
    if config.reference.placement != "own":
        return ()
    ranks = config.reference_megatron.layout.world_size
    return [Place("reference", ranks, config.reference.resources, "reference")]


def _check(config: RunConfig, facts: Facts, _say: Say) -> None:
    from relax_hpc.roles.training import check

    check.check_reference(config, facts)


def _main() -> Callable[[ModelRank[RunConfig]], None]:
    from relax_hpc.roles.scorer import build

    return lambda rank: build.main(rank, build.of_reference(rank.config))


REFERENCE = Role(
    "reference",
    RunConfig,
    main_of_rank(_main),
    _places,
    _check,
    is_one_world=True,
    writes="reference",
    work="logprobs of another model",
    profile="reference",
)
