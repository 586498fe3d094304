"""The orders of `bench.sync` to the ranks of its trainer."""

from pathlib import Path
from typing import NamedTuple

from relax_hpc.config.run import RunConfig
from relax_hpc.paths import RunPaths

LOGPROB_VERSIONS = (0, 1, 10)
"""Versions after which the engines' logprobs are compared with the trainer's."""
ATTEMPT = "1"
"""Attempt of the engines' start."""


class Task(NamedTuple):
    """Orders to the ranks of the trainer."""

    config: RunConfig
    shape: str
    updates: int
    first_gpu_of_engines: int
    compare_logprobs: bool
    every_s: float
    """Seconds from the end of an update to the next."""

    @property
    def is_colocated(self) -> bool:
        """Engines are on the trainer's GPUs."""
        return self.config.rollout_pool.placement == "actor"

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.config.run_dir)

    @property
    def results(self) -> Path:
        return self.config.run_dir / "figures.json"

    @property
    def num_ranks(self) -> int:
        """Number of the trainer's ranks."""
        return self.config.actor.layout.world_size
