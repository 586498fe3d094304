"""One job in each mode: engine and trainer in turn on all GPUs, or each on its own at some lag."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc import job_file
from relax_hpc.bench.modes.long_tail import Lengths
from relax_hpc.config.run import OWN_UNDER_LEASE, RunConfig
from relax_hpc.engines.sglang.launch import size_of
from relax_hpc.errors import ConfigError

COLOCATE = "colocate"
MODES = (COLOCATE, "staleness-0", "staleness-1", "staleness-2")


class Mode(NamedTuple):
    """A way to share GPUs between sampling and training."""

    name: str

    @property
    def is_colocated(self) -> bool:
        return self.name == COLOCATE

    @property
    def lag(self) -> int:
        """`schedule.max_staleness`."""
        return 0 if self.is_colocated else int(self.name.partition("-")[2])


class Work(NamedTuple):
    """Work that is the same in every mode."""

    lengths: Lengths
    """How many tokens responses have."""
    warm_up: int
    """Steps before those that are measured."""
    steps: int
    """Steps that are measured: a multiple of lag + 1, since so many batches are sampled at a time,
    and ready at about the same."""

    @property
    def last(self) -> int:
        """The last step that is measured."""
        return self.warm_up + self.steps


def modes(names: Sequence[str]) -> list[Mode]:
    """The modes of these names; all of `MODES` without one.

    Raises:
        ConfigError: there is no such mode.
    """
    for name in names:
        if name != COLOCATE and not re.fullmatch(r"staleness-\d+", name):
            raise ConfigError(f"--mode {name}: there is none; use {COLOCATE} or staleness-N")
    return [Mode(name) for name in names or MODES]


def job(mode: Mode, work: Work, path: Path, folder: Path, overrides: Sequence[str]) -> RunConfig:
    """The job of a mode.

    Args:
        mode: that it runs in.
        work: what it does.
        path: of a job whose engines and trainer have GPUs of their own.
        folder: its run directory is made there, and the file of its environment.
        overrides: further settings, which hold in all modes.

    Raises:
        ConfigError: it is another job, or cannot be run in this mode.
    """
    if work.steps % (mode.lag + 1):
        raise ConfigError(
            f"--steps {work.steps}: in {mode.name} {mode.lag + 1} batches are ready at a time, "
            "and a part of these would look faster or slower than it is; use a multiple, e.g. "
            f"{6 if mode.lag < 3 else 2 * (mode.lag + 1)}"
        )
    base = job_file.load(path, overrides)
    if not isinstance(base, RunConfig):
        raise ConfigError(f"{path}: a job with [sft] samples nothing; name one of another kind")
    if base.rollout_pool.placement != "own":
        raise ConfigError(
            f"{path}: engines.rollout.placement = {base.rollout_pool.placement!r}; use 'own', the "
            f"mode {COLOCATE} is made of it"
        )
    tree = base.model_dump(mode="json")
    tree |= {"name": mode.name, "run_root": str(folder.absolute()), "eval": {}}
    tree["rollout"] |= {
        "environment": work.lengths.write(folder),
        "max_new_tokens": work.lengths.p99,
        "over_sampling": 0.0,
    }
    # Sampling goes on beside the last step that is measured, as it does beside all before.
    num_steps = work.last + mode.lag + 1
    steps = {"num_steps": num_steps, "max_staleness": mode.lag, "over_age": "wait"}
    tree["schedule"] |= steps
    tree["algorithm"] |= {"groups": {"name": "as_sampled", "truncated": "keep"}}
    tree["actor"] |= {"save_every": num_steps}
    tree["launch"] |= {"max_restarts": 0}
    tree["prompts"] |= {"retire_after": 0}
    if mode.is_colocated:
        _share(base, tree, path)
    made = job_file.validate(tree, source=f"{path} as {mode.name}")
    assert isinstance(made, RunConfig)
    return made


def _share(base: RunConfig, tree: dict[str, Any], path: Path) -> None:
    """Gives the GPUs of both sides to both: more engines, and more replicas of the trainer."""
    pool, layout = base.rollout_pool, base.actor.layout
    size = size_of(pool.args).gpus if pool.kind == "sglang" else 1
    total = size * pool.count + layout.world_size
    count, rest = divmod(total, size)
    replicas, left = divmod(total * layout.data_parallel, layout.world_size)
    if rest or left:
        raise ConfigError(
            f"{path}: its {size * pool.count} ranks of engines and {layout.world_size} of the "
            f"actor are {total}; in mode {COLOCATE} engines of {size} and replicas of "
            f"{layout.world_size // layout.data_parallel} have to fill them; use other numbers"
        )
    asked = pool.resources.model_dump(mode="json", exclude_unset=True)
    tree["engines"]["rollout"] |= {
        "placement": "actor",
        "count": count,
        "engines_per_task": count,
        "resources": {key: asked[key] for key in OWN_UNDER_LEASE if key in asked},
    }
    tree["actor"]["layout"]["data_parallel"] = replicas
    on_gpus = base.actor.resources.gpus_per_node > 0
    tree["actor"]["resources"] |= {"nodes": 1, "gpus_per_node": total if on_gpus else 0}
