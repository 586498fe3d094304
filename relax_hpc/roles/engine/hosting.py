"""The facts that a task needs of an engine that it keeps, and nothing else of the job."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from relax_hpc.config.engines import ROLLOUT, EnginePool, follows_policy
from relax_hpc.config.rollout import Transport
from relax_hpc.config.run import RunConfig, engines_of
from relax_hpc.engines.sglang.launch import size_of
from relax_hpc.engines.spec import EngineSpec
from relax_hpc.roles.context import TaskContext
from relax_hpc.sections import PassThrough


class Slot(NamedTuple):
    """An engine that a task keeps, and its place on its node."""

    id: str
    """Id of the engine's member record."""
    number: int
    """Number among the engines of its pool: seeds its random numbers."""
    local_index: int
    """Number among the engines of its node: says which GPUs are its own."""
    part: int = 0
    """Part of an engine over several nodes; 0 is its host."""


@dataclass(frozen=True, slots=True)
class Hosting:
    """One engine of a pool, and how it is kept."""

    spec: EngineSpec
    slot: Slot
    follows_policy: bool
    """Whether the trainer gives it weights."""
    shares_gpus: bool
    """Whether it computes on the trainer's GPUs, while it has their lease."""
    on_gpus: bool
    hang_timeout_s: float
    max_restarts: int
    peer_timeout_s: float
    transport: Transport
    """The way of weights to it."""
    recomputes: bool
    """An update throws the key-value cache away."""
    loads_itself: bool = False
    """Whether its task has it load the newest snapshot, and not the trainer."""
    update_timeout_s: float = math.inf
    """Limit of such a load."""

    @property
    def num_ranks(self) -> int:
        return 1 if self.spec.kind == "embedded" else size_of(self.spec.args).gpus

    def least_gpus(self, context: TaskContext) -> int:
        """The GPUs that the node of a task has to have."""
        own = self.num_ranks // self.spec.nodes if self.on_gpus else 0
        return max(context.gpus, own)


def slots_of(pool: EnginePool, context: TaskContext) -> list[Slot]:
    """Returns the engines of a task: one, several, or one with its neighbours.

    Neighbours have consecutive ranks, since Slurm fills nodes in order of rank.
    """
    task, part = divmod(context.rank, pool.nodes_per_engine)
    count = pool.engines_per_task
    return [
        Slot(name, task * count + index, context.local_rank * count + index, part)
        for index, name in enumerate(engines_of(f"{context.component}-{task}", count))
    ]


def hosting_of(
    config: RunConfig, slot: Slot, name: str = ROLLOUT, transport: Transport | None = None
) -> Hosting:
    """Returns the facts of an engine of the pool `name`.

    Args:
        config: of the run.
        slot: of the engine.
        name: of its pool.
        transport: how weights get to it, if not as `weights.transport` says.
    """
    pool = config.engines[name]
    follows = follows_policy(name)
    return Hosting(
        spec_of(config, slot, name),
        slot,
        follows_policy=follows,
        shares_gpus=pool.placement == "actor",
        on_gpus=pool.resources.gpus_per_node > 0,
        hang_timeout_s=pool.hang_timeout_s,
        max_restarts=config.launch.max_restarts,
        peer_timeout_s=config.launch.peer_timeout_s,
        transport=transport or config.weights.transport,
        recomputes=follows and config.weights.kv_cache == "recompute",
        loads_itself=follows and config.launch.layout == "separate",
        update_timeout_s=config.weights.timeout_s,
    )


def spec_of(config: RunConfig, slot: Slot, name: str = ROLLOUT) -> EngineSpec:
    """Returns what an engine of the pool `name` computes."""
    pool = config.engines[name]
    follows = follows_policy(name)
    return EngineSpec(
        pool.kind,
        pool.model or config.model.path,
        config.model.dtype,
        args_on_own_gpus(pool, slot),
        seed=config.seed + slot.number,
        max_running_requests=pool.max_running_requests,
        start_timeout_s=pool.start_timeout_s,
        nodes=pool.nodes_per_engine,
        routed_experts=follows and config.replays_routing,
        quantization=config.weights.quantization_config if follows else None,
        pool=name,
    )


def args_on_own_gpus(pool: EnginePool, slot: Slot) -> PassThrough:
    """Returns the engine's arguments with its first GPU.

    Engines of one node take its GPUs one after the other; Slurm shows each of them all.
    """
    if pool.kind != "sglang" or not pool.resources.gpus_per_node:
        return pool.args
    per_node = size_of(pool.args).gpus // pool.nodes_per_engine
    own: PassThrough = {"base_gpu_id": slot.local_index * per_node}
    if pool.placement == "actor":
        own["enable_memory_saver"] = True
    return own | pool.args
