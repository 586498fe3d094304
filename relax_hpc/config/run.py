"""A run of reinforcement learning, and what every job has."""

import math
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from relax_hpc.algorithms.advantages.gae import Gae
from relax_hpc.algorithms.algorithm import Algorithm, algorithm_of
from relax_hpc.algorithms.distill import COLUMN
from relax_hpc.config import algorithm_checks, teachers
from relax_hpc.config import engines as pools
from relax_hpc.config.actor import ActorConfig, ReferenceConfig
from relax_hpc.config.boards import BoardsConfig, NotifyConfig
from relax_hpc.config.critic import CriticConfig
from relax_hpc.config.engines import ROLLOUT, EnginePool, Pools
from relax_hpc.config.launch import LaunchConfig, check_layout
from relax_hpc.config.layout import MegatronConfig
from relax_hpc.config.model import ModelConfig
from relax_hpc.config.prompts import Columns, PromptsConfig, with_columns
from relax_hpc.config.reward import RewardConfig
from relax_hpc.config.rollout import RolloutConfig, StopTexts, WeightsConfig, check_program
from relax_hpc.config.teachers import Teachers, columns_by_teacher
from relax_hpc.schema import COLUMNS, ROUTED_EXPERTS, columns_of
from relax_hpc.sections import (
    NAME,
    Data,
    NonNegative,
    Number,
    Positive,
    Section,
    SharedResources,
    UserPath,
)

_ROUNDING = {"float32": 1e-3, "float16": 0.03, "half": 0.03, "bfloat16": 0.15}
"""Type of a model -> mean difference of logprobs between two sets of kernels, nats, at most."""
RESTART_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds before a component, an engine or the scaler is started again: after its first failure,
after its second, and so on; the last of them from then on."""
RESTART_WINDOW_S = 1800.0
"""Seconds within which a component or an engine may fail `launch.max_restarts` times."""
OWN_UNDER_LEASE = ("python", "setup", "srun", "cpus_per_task")
"""Fields of `engines.rollout.resources` that are its own where it shares the actor's GPUs."""


class ScheduleConfig(Section):
    """The order and length of sampling and training."""

    num_steps: Positive
    """Batches to train on; step b turns policy b-1 into policy b."""
    prompts_per_step: Positive = 32
    """Prompt groups of one batch."""
    max_staleness: NonNegative = 1
    """Policy versions a sampled token may lag behind: 0 is on-policy, 1 overlaps one step."""
    over_age: Literal["wait", "drop", "mask"] = "wait"
    """Prompt groups that make up a batch. wait: its own, so no token is ever over age. drop: those
    that are ready; a group that grew older than max_staleness is sampled again. mask: likewise, but
    it is trained on, and its over-age tokens leave the loss."""


class BusConfig(Section):
    keep_steps: NonNegative = 2
    """Steps whose shards are kept longer than any resume needs them, to be looked at, replayed or
    exported."""
    compress: list[str] = []
    """Columns to be compressed, e.g. "ragged/routed_experts"; pays only where a writer gets less
    than about 0.4 GB/s from the file system."""

    @model_validator(mode="after")
    def _columns_exist(self) -> Self:
        for name in self.compress:
            if name not in COLUMNS:
                raise ValueError(
                    f"bus.compress names {name}; columns are {', '.join(sorted(COLUMNS))}"
                )
        return self


class EvalConfig(Section):
    """A set of prompts that nothing is trained on: scored before, during and after training."""

    path: Data
    """Data, named and read as `prompts.train`."""
    columns: Columns = Columns()
    """Names of its fields, by the keys of `prompts.columns`, whose names it has where it says none.
    """
    every: NonNegative = 20
    """Steps between evaluations; 0 evaluates before and after only."""
    num_prompts: Positive = 256
    """Prompts used, from the top of the file."""
    samples_per_prompt: Positive = 1
    """Responses to each of them."""
    temperature: Annotated[Number, Field(ge=0)] = 0.0
    """Temperature of sampling; 0 is greedy."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Sample from the fewest tokens that have this much of the probability together."""
    top_k: NonNegative = 0
    """Sample from so many tokens, the most likely ones; 0 is all."""
    stop: StopTexts | None = None
    """Texts that end a response, which keeps them; an end of sequence does so, too. Unset is
    `rollout.stop`; [] is none."""
    max_new_tokens: Positive | None = None
    """Tokens of a response; unset is `rollout.max_new_tokens`."""


class JobConfig(Section):
    """The common part of every job: a model, an actor that trains it, and a launcher."""

    name: Annotated[str, Field(pattern=NAME, max_length=200)]
    """Name of the run and of its Slurm job; a run directory is used once."""
    run_root: UserPath = Path("runs")
    """The run directory is made below this one, on a file system every node sees; unset is
    $RELAX_RUN_ROOT, then runs."""
    seed: NonNegative = 0
    """Root of every random stream of the run, also of the order of the training prompts, which is
    drawn anew each epoch."""
    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    launch: LaunchConfig = LaunchConfig()
    resources: SharedResources = SharedResources()
    """Resources of every component, as `<component>.resources`, which override them; without
    `nodes`, `max_nodes` and `gpus`."""
    boards: BoardsConfig = BoardsConfig()
    notify: NotifyConfig = NotifyConfig()

    @property
    def run_dir(self) -> Path:
        return self.run_root / self.name

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Batches to train on."""

    @property
    @abstractmethod
    def epochs_per_step(self) -> int:
        """Passes over a batch, each an optimizer update."""

    @property
    def steps_of_critic_alone(self) -> int:
        """First steps in which the policy stands still."""
        return 0

    @property
    @abstractmethod
    def temperature(self) -> float:
        """Temperature of the distribution whose logprobs are trained."""

    @model_validator(mode="after")
    def _ranks_fill_nodes(self) -> Self:
        ranks = "the actor's ranks (tensor x pipeline x context x data_parallel)"
        _check_nodes(ranks, self.actor.layout.world_size, self.actor.resources.nodes)
        return self


class RunConfig(JobConfig):
    """Reinforcement learning; `config.sft.SftRunConfig` is the other kind of job."""

    prompts: PromptsConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    engines: Pools = {ROLLOUT: EnginePool()}
    """Pools of engines by name. `rollout` samples what is trained on; others serve those who name
    them."""
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig | None = None
    teachers: Teachers = {}
    """Teachers by name; prompts of each source have one."""
    schedule: ScheduleConfig
    algorithm: Algorithm = algorithm_of()
    bus: BusConfig = BusConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: dict[Annotated[str, Field(pattern=NAME, max_length=100)], EvalConfig] = {}
    """Held-out sets by name; curve and summary show the first."""

    @property
    def num_steps(self) -> int:
        return self.schedule.num_steps

    @property
    def epochs_per_step(self) -> int:
        return self.algorithm.epochs_per_step

    @property
    def temperature(self) -> float:
        return self.rollout.temperature

    @property
    def max_logprob_gap(self) -> float:
        """Mean difference between the engines' logprobs and the trainer's that rounding explains.

        Measured: 1e-7 to 1e-5 in float32, 0.007 to 0.036 in bfloat16 (docs/benchmarks.md); the
        models that differ in a scaling of RoPE or a head were 0.9 to 2.8 apart.
        """
        if self.weights.max_logprob_gap is not None:
            return self.weights.max_logprob_gap
        args = self.rollout_pool.args
        few_bits = args.keys() & {"quantization", "kv_cache_dtype", "torchao_config"}
        if few_bits or self.weights.quantize != "none":
            return 0.5
        types = (self.model.dtype, str(args.get("dtype", self.model.dtype)))
        return max(_ROUNDING.get(dtype, 0.0) for dtype in types)

    @property
    def rollout_pool(self) -> EnginePool:
        """The engines that sample what is trained on: their weights follow the policy."""
        return self.engines[ROLLOUT]

    @property
    def producers(self) -> list[str]:
        """Names of the bus producers of the rollout tasks that there are, by rank."""
        return [f"rollout-{rank}" for rank in range(self.rollout_pool.num_hosts)]

    @property
    def rollout_engines(self) -> list[str]:
        """Names of the engines that the job starts with, in the order of their GPUs."""
        return self.engines_in(ROLLOUT)

    def engines_in(self, pool: str) -> list[str]:
        """Names of the engines that a pool starts with, in the order of their GPUs."""
        size = self.engines[pool]
        tasks = [f"{pool}-{rank}" for rank in range(size.num_hosts)]
        return [name for task in tasks for name in engines_of(task, size.engines_per_task)]

    @property
    def reference_model(self) -> ModelConfig:
        """The model whose weights the reference has."""
        return self.reference.model(self.model)

    @property
    def reference_megatron(self) -> MegatronConfig:
        """The settings by which a reference that is a component of its own computes."""
        return self.reference.megatron(self.actor)

    @property
    def gamma(self) -> float:
        """Discount of a step from token to token."""
        advantage = self.algorithm.advantage
        return advantage.gamma if isinstance(advantage, Gae) else 1.0

    @property
    def steps_of_critic_alone(self) -> int:
        """First steps in which the policy stands still."""
        return self.critic.warmup_steps if self.critic else 0

    @property
    def columns(self) -> frozenset[str]:
        """Columns that rows are trained on with, besides those that rollout always writes."""
        measured = columns_of("reference") if self.reference.placement != "none" else {}
        routed = [ROUTED_EXPERTS] * self.replays_routing
        return frozenset({*self.reasons, *measured, *routed})

    @property
    def reasons(self) -> dict[str, str]:
        """Columns that the algorithm needs -> the setting that wants them."""
        found = dict(self.algorithm.needs.columns)
        if key := found.get(COLUMN):
            found |= dict.fromkeys(columns_by_teacher(self.teachers).values(), key)
        return found

    @property
    def replays_routing(self) -> bool:
        """Whether tokens are trained with the experts that the engine sent them to."""
        return bool(self.rollout.routed_experts)

    @property
    def tokens_per_portion(self) -> float:
        """Tokens of a batch that are worth starting on before the rest is there."""
        if self.rollout_pool.placement == "actor":
            return math.inf  # engines sample the rest with the memory that training takes
        if self.algorithm.waits_for_the_batch:
            return math.inf
        return self.actor.tokens_per_portion

    @model_validator(mode="before")
    @classmethod
    def _sets_have_columns(cls, given: Any) -> Any:  # noqa: ANN401
        prompts = given.get("prompts") if isinstance(given, dict) else None
        if not isinstance(prompts, dict) or "eval" not in given:
            return given
        return given | {"eval": with_columns(given["eval"], prompts.get("columns"))}

    @model_validator(mode="after")
    def _pools_can_be(self) -> Self:
        check_program(self.rollout)
        for name, pool in self.engines.items():
            pools.check(name, pool)
        if self.rollout.routed_experts and self.rollout_pool.kind != "sglang":
            raise ValueError(
                "rollout.routed_experts = true: the embedded engine has no experts; use "
                "engines.rollout.kind = 'sglang', or false"
            )
        if self.rollout.routed_experts and self.rollout.stop:
            raise ValueError(
                "rollout.routed_experts = true: an engine tells experts of responses that it ends "
                "itself, and it knows no texts (rollout.stop); use false, or no stop"
            )
        return self

    @model_validator(mode="after")
    def _lease_is_possible(self) -> Self:
        """An actor and a rollout that share GPUs wait for each other."""
        pool, key = self.rollout_pool, 'engines.rollout.placement = "actor"'
        if pool.placement == "own":
            return self
        if self.schedule.max_staleness:
            raise ValueError(
                f"schedule.max_staleness = {self.schedule.max_staleness}: with {key} nothing is "
                "sampled while the actor trains; set it to 0"
            )
        if pool.nodes_per_engine > 1:
            raise ValueError(
                f"engines.rollout.nodes_per_engine = {pool.nodes_per_engine}: with {key} "
                "an engine is on one node; use 1"
            )
        if self.launch.bootstrap == "mpi_job":
            raise ValueError(
                f"launch.bootstrap = 'mpi_job': with {key} there are two steps on the same nodes; "
                "use 'mpi'"
            )
        asked, actors = pool.resources, self.actor.resources
        if asked.max_nodes is not None:
            raise ValueError(
                f"engines.rollout.resources.max_nodes = {asked.max_nodes}: with {key} "
                "engines are on the actor's GPUs, and none can be added; remove it"
            )
        for name in asked.model_fields_set - set(OWN_UNDER_LEASE):
            if getattr(asked, name) != getattr(actors, name):
                raise ValueError(
                    f"engines.rollout.resources.{name} = {getattr(asked, name)!r}: with {key} "
                    f"it is actor.resources.{name} = {getattr(actors, name)!r}; remove it"
                )
        return self

    @model_validator(mode="after")
    def _sides_can_be_apart(self) -> Self:
        check_layout(self)
        return self

    @model_validator(mode="after")
    def _needed_reference_is_there(self) -> Self:
        for column, key in self.algorithm.needs.columns.items():
            if column in columns_of("reference") and self.reference.placement == "none":
                raise ValueError(
                    f"{key}: needs a reference; set reference.placement to 'actor' or 'own'"
                )
        return self

    @model_validator(mode="after")
    def _over_sampling_needs_free_batches(self) -> Self:
        if self.rollout.over_sampling and self.schedule.over_age == "wait":
            raise ValueError(
                f"rollout.over_sampling = {self.rollout.over_sampling}: needs batches of the first "
                "that are ready; set schedule.over_age to 'drop' or 'mask'"
            )
        return self

    @model_validator(mode="after")
    def _algorithm_fits(self) -> Self:
        algorithm_checks.check(self)
        teachers.check(self)
        return self

    @model_validator(mode="after")
    def _tasks_fill_nodes(self) -> Self:
        for name, pool in self.engines.items():
            nodes = (self.actor if pool.placement == "actor" else pool).resources.nodes
            several = f" / engines.{name}.engines_per_task" * (pool.engines_per_task > 1)
            _check_nodes(f"engines.{name}.count{several}", pool.num_tasks, nodes)
        if self.reference.placement == "own":
            ranks = "the reference's ranks (tensor x pipeline x context x data_parallel)"
            size = self.reference_megatron.layout.world_size
            _check_nodes(ranks, size, self.reference.resources.nodes)
        if self.critic:
            ranks = "the critic's ranks (tensor x pipeline x context x data_parallel)"
            size = self.critic.megatron(self.actor).layout.world_size
            _check_nodes(ranks, size, self.critic.resources.nodes)
        for name, teacher in self.teachers.items():
            ranks = f"the ranks of teachers.{name} (tensor x pipeline x context x data_parallel)"
            size = teacher.megatron(self.actor, name).layout.world_size
            _check_nodes(ranks, size, teacher.resources.nodes)
        return self


def engines_of(task: str, count: int) -> list[str]:
    """Names of the engines that a rollout task keeps."""
    return [task] if count == 1 else [f"{task}.{index}" for index in range(count)]


def _check_nodes(key: str, tasks: int, nodes: int) -> None:
    if tasks % nodes:
        raise ValueError(
            f"{key} = {tasks}: does not divide over {nodes} nodes; "
            f"use a multiple of {nodes}, or change resources.nodes"
        )
