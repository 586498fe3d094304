"""Declares the actor: it trains the policy on batches of the bus, and publishes its weights.

Declares its replay, too: it trains a step again from a run's shards, and no job has that role.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from relax_hpc.config.run import RunConfig
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.role import TRAINER_ENVIRONMENT, ModelRank, Place, Role, Say, main_of_rank
from relax_hpc.runtime.files.records import read_json, write_json

REPLAY_COMPONENT = "replay"
"""Name of a replay's component, in place of the actor."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The record `control/replay.json`: the step to train again, its run, and the first step."""

    run_dir: Path
    step: int
    first: int
    """First step to train: `step`, or one before it."""
    checkpoint: Path | None
    """Checkpoint of the step before `first`; None begins with the job's model."""

    def write(self, path: Path) -> None:
        folder = self.checkpoint and str(self.checkpoint)
        write_json(path, asdict(self) | {"run_dir": str(self.run_dir), "checkpoint": folder})

    @classmethod
    def read(cls, path: Path) -> Self:
        fields = read_json(path)
        assert fields is not None, path
        folder = fields["checkpoint"] and Path(fields["checkpoint"])
        return cls(Path(fields["run_dir"]), fields["step"], fields["first"], folder)


def _places(config: RunConfig) -> Sequence[Place]:
    return [Place("actor", config.actor.layout.world_size, config.actor.resources, "actor")]


def _check(config: RunConfig, facts: Facts, say: Say) -> None:
    from relax_hpc.roles.training import check, gpu_memory

    check.check_trainer(config)
    gpu_memory.tell(config, facts.shape, say)


def _main() -> Callable[[ModelRank[RunConfig]], None]:
    from relax_hpc.roles.actor import build

    return build.main


def _replay() -> Callable[[ModelRank[RunConfig]], None]:
    from relax_hpc.roles.actor import replay

    def main(rank: ModelRank[RunConfig]) -> None:
        asked = Replay.read(rank.paths.replayed)
        replay.main(rank, asked.run_dir, asked.step, asked.checkpoint)

    return main


ACTOR = Role(
    "actor",
    RunConfig,
    main_of_rank(_main),
    _places,
    _check,
    is_one_world=True,
    work="trains",
    profile="actor",
    environment=TRAINER_ENVIRONMENT,
)
REPLAY = Role(
    REPLAY_COMPONENT,
    RunConfig,
    main_of_rank(_replay),
    is_one_world=True,
    work="trains a step again",
    environment=TRAINER_ENVIRONMENT,
)
