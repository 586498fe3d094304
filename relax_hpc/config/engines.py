"""Pools of engines: `[engines.NAME]` declares one, and whoever samples names it."""

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
"""The pool that samples what is trained on. Every job has it."""


def follows_policy(name: str) -> bool:
    """Whether a pool is given the actor's weights; any other stays as it was loaded."""
    return name == ROLLOUT


class EnginePool(Section):
    kind: Literal["embedded", "sglang"] = "embedded"
    """`sglang` is the production engine; `embedded` runs anywhere torch does."""
    model: UserPath | None = None
    """Hugging Face folder of a pool other than `rollout`; unset is `model.path`."""
    placement: Literal["own", "actor"] = "own"
    """own: a component with nodes of its own. actor: on the actor's GPUs, which the two use in
    turn; `schedule.max_staleness` is 0 then, and `resources` are the actor's."""
    count: Positive = 1
    """Engines of the pool when the job starts."""
    engines_per_task: Positive = 1
    """Engines that a task of the component keeps, each on GPUs of its own: with all of a node, the
    node has one task, which is one bus producer. An engine over several nodes has tasks alone."""
    nodes_per_engine: Positive = 1
    """Above 1, an engine spans that many nodes, with one task on each; `kind` is sglang then."""
    max_running_requests: Positive = 256
    """Trajectories an engine decodes at once."""
    start_timeout_s: Positive = 900
    """An engine that is not healthy after this many seconds has failed to start."""
    hang_timeout_s: Positive = 120
    """An engine that says nothing for this many seconds, outside an update, is started again."""
    drain_slow: bool = False
    """A task gives an engine nothing new for ten minutes if that samples less than half as fast as
    the median of its engines, of three or more."""
    args: PassThrough = {}
    """Passed to the engine's own parser, e.g. mem_fraction_static = 0.8 for SGLang."""
    resources: Resources = Resources()

    @property
    def num_hosts(self) -> int:
        """Tasks that can be asked: of an engine over several nodes it is the first."""
        return self.count // self.engines_per_task

    @property
    def num_tasks(self) -> int:
        return self.num_hosts * self.nodes_per_engine

    @property
    def is_apart(self) -> bool:
        """Whether no engine is on two nodes."""
        return self.nodes_per_engine == 1


def check(name: str, pool: EnginePool) -> None:
    """Checks a pool for itself.

    Raises:
        ValueError: a combination that cannot be run; says what can.
    """
    key = f"engines.{name}"
    _check_weights(key, name, pool)
    per_task = f"{key}.engines_per_task = {pool.engines_per_task}"
    if pool.count % pool.engines_per_task:
        raise ValueError(f"{per_task}: does not divide {key}.count = {pool.count}; use a divisor")
    if pool.engines_per_task > 1 and pool.nodes_per_engine > 1:
        raise ValueError(
            f"{per_task}: an engine over {pool.nodes_per_engine} nodes ({key}.nodes_per_engine) "
            "has a task on each of them for itself; use 1"
        )
    if pool.nodes_per_engine == 1:
        return
    spread = f"{key}.nodes_per_engine = {pool.nodes_per_engine}"
    if pool.kind != "sglang":
        raise ValueError(
            f"{spread}: the embedded engine is one process; use {key}.kind = 'sglang', or 1"
        )
    if pool.resources.nodes != pool.num_tasks:
        raise ValueError(
            f"{spread}: {pool.count} engines take {pool.num_tasks} nodes of their own; "
            f"set {key}.resources.nodes to it"
        )


def _check_weights(key: str, name: str, pool: EnginePool) -> None:
    if follows_policy(name) and pool.model is not None:
        raise ValueError(
            f"{key}.model = '{pool.model}': its weights follow the policy, whose model is "
            "model.path; leave it out"
        )
    if follows_policy(name):
        return
    if pool.placement != "own":
        raise ValueError(
            f"{key}.placement = {pool.placement!r}: only the pool that follows the policy shares "
            "the actor's GPUs; use 'own'"
        )
    if pool.resources.max_nodes is not None:
        raise ValueError(
            f"{key}.resources.max_nodes = {pool.resources.max_nodes}: engines are added to the "
            f"pool {ROLLOUT} only; remove it"
        )


def _with_rollout(tables: Any) -> Any:  # noqa: ANN401
    """Every job has the pool that follows the policy; others stay as they are."""
    if not isinstance(tables, dict):
        return tables
    return {ROLLOUT: {}} | tables


PoolName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$", max_length=40)]
Pools = Annotated[dict[PoolName, EnginePool], BeforeValidator(_with_rollout)]
