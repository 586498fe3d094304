"""Configures pools of engines: `[engines.NAME]` declares one, and users refer to it by name."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from relax_hpc.sections import (
    PassThrough,
    Positive,
    Resources,
    Section,
    UserPath,
)

ROLLOUT = "rollout"
"""The pool that samples training data. Every job has it."""
OWN_UNDER_LEASE = ("python", "setup", "srun", "cpus_per_task")
"""Fields of `engines.rollout.resources` that stay its own if it shares the actor's GPUs."""


def follows_policy(name: str) -> bool:
    """Whether a pool gets the actor's weights; others keep those they loaded."""
    return name == ROLLOUT


class PoolAdvanced(Section):
    start_timeout_s: Positive = 900
    """Seconds in which an engine must become healthy; otherwise its start has failed."""
    hang_timeout_s: Positive = 120
    """Seconds of silence, outside an update, after which an engine is restarted."""
    drain_slow: bool = False
    """A task gives an engine nothing new for ten minutes if it samples less than half as fast as
    the median of its engines. Needs three or more."""
    engines_per_gpu: Positive = 1
    """Engines of one GPU each that share it, side by side in a task. With a small model, the
    scheduler of one engine leaves most of a GPU idle. SGLang gives each a share of what is free
    when it starts; so set `args.max_total_tokens`, the size of each cache."""


class EnginePool(Section):
    kind: Literal["embedded", "sglang"] = "embedded"
    """`sglang` is the production engine; `embedded` runs anywhere torch does."""
    model: UserPath | None = None
    """Model of a pool other than `rollout`, named as in `model.path`; unset is that one."""
    placement: Literal["own", "actor"] = "own"
    """own: a component with nodes of its own. actor: on the actor's GPUs, which the two use in
    turn; `schedule.max_staleness` is 0 then, and `resources` are the actor's."""
    count: Positive = 1
    """Number of engines when the job starts."""
    engines_per_task: Positive = 1
    """Engines per task, each on its own GPUs unless `advanced.engines_per_gpu` is set. With all
    engines of a node, the node has one task, which is one bus producer. An engine over several
    nodes has tasks alone."""
    nodes_per_engine: Positive = 1
    """Above 1, an engine spans that many nodes, with one task on each; needs `kind` sglang."""
    max_running_requests: Positive = 256
    """Trajectories that an engine decodes at once."""
    advanced: PoolAdvanced = PoolAdvanced()
    args: PassThrough = {}
    """Passed to the engine's own parser, e.g. mem_fraction_static = 0.8 for SGLang."""
    resources: Resources = Resources()

    @property
    def num_hosts(self) -> int:
        """Tasks that answer requests: for an engine over several nodes the first."""
        return self.count // self.engines_per_task

    @property
    def num_tasks(self) -> int:
        return self.num_hosts * self.nodes_per_engine

    @property
    def lanes_per_rank(self) -> int:
        """Engine ranks on the GPU of each rank of the actor."""
        return self.advanced.engines_per_gpu if self.placement == "actor" else 0

    @property
    def is_apart(self) -> bool:
        """Whether no engine spans two nodes."""
        return self.nodes_per_engine == 1


def _with_rollout(tables: Any) -> Any:  # noqa: ANN401
    """Adds the pool `rollout`, which every job has."""
    if not isinstance(tables, dict):
        return tables
    return {ROLLOUT: {}} | tables


PoolName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$", max_length=40)]
Pools = Annotated[dict[PoolName, EnginePool], BeforeValidator(_with_rollout)]
