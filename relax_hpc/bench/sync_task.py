"""What `bench.sync` asks of the ranks of its trainer."""

from pathlib import Path
from typing import NamedTuple

from relax_hpc.config.run import RunConfig
from relax_hpc.paths import RunPaths

LOGPROB_VERSIONS = (0, 1, 10)
"""After which the engines' logprobs are compared with the trainer's."""
ATTEMPT = "1"
"""Of the engines' start."""


class Task(NamedTuple):
    """What the ranks of the trainer are told."""

    config: RunConfig
    shape: str
    updates: int
    first_gpu_of_engines: int
    compare_logprobs: bool
    every_s: float
    """From the end of an update to the next."""

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
        """Of the trainer."""
        return self.config.actor.layout.world_size
