"""Configures a job: reinforcement learning, or supervised fine-tuning (a section [sft])."""

import ipaddress
import math
import re
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from relax_hpc.algorithms.advantages.gae import Gae
from relax_hpc.algorithms.algorithm import Algorithm, algorithm_of
from relax_hpc.algorithms.distill import COLUMN
from relax_hpc.config import checks
from relax_hpc.config.actor import (
    ActorConfig,
    CriticConfig,
    ReferenceConfig,
    Teachers,
    columns_by_teacher,
)
from relax_hpc.config.engines import ROLLOUT, EnginePool, Pools
from relax_hpc.config.model import MegatronConfig, ModelConfig
from relax_hpc.config.prompts import Columns, PromptsConfig, with_columns
from relax_hpc.config.rollout import (
    RewardConfig,
    RolloutConfig,
    StopTexts,
    WeightsConfig,
)
from relax_hpc.runtime.telemetry import Service
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
"""Type of a model -> largest mean difference of logprobs between kernels, in nats."""
RESTART_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds before a component, an engine or the scaler is restarted after its first, second, ...
failure; the last value repeats."""
RESTART_WINDOW_S = 1800.0
"""Window in seconds for `launch.max_restarts` failures."""


class ScheduleConfig(Section):
    """The order and length of sampling and training."""

    num_steps: Positive
    """Batches to train on; step b turns policy b-1 into policy b."""
    prompts_per_step: Positive = 32
    """Prompt groups per batch."""
    max_staleness: NonNegative = 1
    """Policy versions a sampled token may lag behind: 0 is on-policy, 1 overlaps one step."""
    over_age: Literal["wait", "drop", "mask"] = "wait"
    """Which prompt groups form a batch. wait: its own, so no token is ever over age. drop: those
    that are ready; a group older than max_staleness is sampled again. mask: the same, but such a
    group is trained on, without its over-age tokens in the loss."""


class BusAdvanced(Section):
    compress: list[str] = []
    """Columns to compress, e.g. "ragged/routed_experts"; pays only if a writer gets less than about
    0.4 GB/s from the file system."""

    @model_validator(mode="after")
    def _columns_exist(self) -> Self:
        for name in self.compress:
            if name not in COLUMNS:
                raise ValueError(
                    f"bus.advanced.compress names {name}; columns are {', '.join(sorted(COLUMNS))}"
                )
        return self


class BusConfig(Section):
    keep_steps: NonNegative = 2
    """Steps whose shards are kept longer than a resume needs, for viewing, replay and export."""
    advanced: BusAdvanced = BusAdvanced()


class EvalAdvanced(Section):
    one_policy: bool | None = None
    """Whether training waits for an evaluation, so that one policy samples all of it. Unset: where
    engines are on the actor's GPUs."""


class EvalConfig(Section):
    """A held-out set of prompts: scored before, during and after training."""

    path: Data
    """Data, named and read as `prompts.train`."""
    columns: Columns = Columns()
    """Names of its fields, as in `prompts.columns`, which has the defaults."""
    every: NonNegative = 20
    """Steps between evaluations; 0 evaluates before and after only."""
    num_prompts: Positive = 256
    """Prompts used, from the top of the file."""
    samples_per_prompt: Positive = 1
    """Responses per prompt."""
    temperature: Annotated[Number, Field(ge=0)] = 0.0
    """Temperature of sampling; 0 is greedy."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this total probability."""
    top_k: NonNegative = 0
    """Sample from this many most likely tokens; 0 is all."""
    stop: StopTexts | None = None
    """Texts that end a response, which keeps them, as an end of sequence does. Unset is
    `rollout.stop`; [] is none."""
    max_new_tokens: Positive | None = None
    """Most tokens of a response; unset is `rollout.max_new_tokens`."""
    advanced: EvalAdvanced = EvalAdvanced()


def _network(value: str) -> str:
    if "/" in value:
        try:
            ipaddress.ip_network(value, strict=False)
        except ValueError as error:
            raise ValueError(f'is no subnet: {error}; write it as "10.1.0.0/16"') from None
    elif not re.fullmatch(r"[\w.-]{1,15}", value):
        raise ValueError('is neither an interface (say "ib0") nor a subnet (say "10.1.0.0/16")')
    return value


Network = Annotated[str, AfterValidator(_network)]


class LaunchAdvanced(Section):
    bootstrap: Literal["auto", "mpi", "mpi_job", "files", "http"] = "auto"
    """How ranks of a component find each other, and how engines are asked into the group that gets
    weights. auto: ranks by MPI when `resources.mpi` is set, except for engine tasks on one node
    each, where every task is a separate step; engines by MPI where MPICH is installed, else by
    HTTP. files, http: engines in that way, ranks by the run directory. mpi_job: all components are
    one step and one MPI world, so that a rank that dies restarts all of them."""
    idle_s: Positive = 300
    """With layout separate, seconds without work before a side gives its nodes back; it restarts
    when the other side has work for it."""
    network: Network | None = None
    """Network between tasks and engines on each node: an interface ("ib0") or a subnet
    ("10.1.0.0/16"). Gloo and NCCL use it, too, unless `GLOO_SOCKET_IFNAME` or
    `NCCL_SOCKET_IFNAME` says otherwise. Unset is the profile's `network`, then
    `GLOO_SOCKET_IFNAME`, then the one by which Slurm reaches the nodes."""
    peer_timeout_s: Positive = 1800
    """Seconds that a role waits for another before it gives up, naming it."""
    hang_timeout_s: Positive = 300
    """Seconds without a heartbeat, or stopped, after which the watchdog ends a task. A longer phase
    may take 5 times as long as the longest seen, and a new one peer_timeout_s."""
    share: Literal["none", "group"] = "none"
    """Who may read the run directory besides you. group: your Unix group, except for tokens. Nobody
    else can ever write there, whatever your umask."""
    kernel_cache: UserPath | None = None
    """Folder for kernels that torch, Triton, SGLang, FlashInfer, DeepGEMM, TVM and CUDA compile,
    one folder per set of their versions; only yours, created if missing. Unset, torch's are in
    the node's temporary folder, the others in the caches of your home."""


class LaunchConfig(Section):
    layout: Literal["hetjob", "separate"] = "hetjob"
    """hetjob: all components are one job. separate: rollout with its engines is one job, and the
    actor with all that trains or scores is another. They need not run at the same time, and meet
    only in the run directory; needs `weights.transport` files."""
    profile: str | None = None
    """Site profile: a name in ~/.config/relax-hpc, an included one (docs/reference/sites.md), or a
    path to a TOML file. Unset is `$RELAX_PROFILE`, then ~/.config/relax-hpc/default.toml."""
    max_restarts: NonNegative = 3
    """Restarts in place within half an hour of a component whose step failed: after half a second,
    then after twice as long each time, at most 30 s. Failures while Slurm's controller did not
    answer do not count."""
    advanced: LaunchAdvanced = LaunchAdvanced()


News = Literal["start", "requeue", "plateau", "failure", "finish"]


class BoardsAdvanced(Section):
    tracking_uri: str | None = None
    """Server of MLflow, e.g. "http://host:5000"."""
    offline: bool = False
    """Write below the run directory, for nodes without a network: send it later with `wandb sync`;
    MLflow shows its `mlflow.db`."""


class BoardsConfig(Section):
    """Services for the curves of a run; TensorBoard is always on."""

    export: list[Service] = []
    """Services that get the curves as the run goes, each from a separate process that no step waits
    for. wandb: Weights & Biases, with the account of `wandb login`. mlflow: MLflow, at
    `advanced.tracking_uri`."""
    project: Annotated[str, Field(min_length=1, max_length=100)] = "relax-hpc"
    """Project of W&B, or experiment of MLflow."""
    advanced: BoardsAdvanced = BoardsAdvanced()

    @model_validator(mode="after")
    def _mlflow_has_a_place(self) -> Self:
        if "mlflow" in self.export and self.advanced == BoardsAdvanced():
            raise ValueError(
                "boards.export has mlflow, which needs a server; set "
                "boards.advanced.tracking_uri, or boards.advanced.offline = true"
            )
        return self


class NotifyAdvanced(Section):
    plateau_steps: NonNegative = 0
    """Steps without a better reward that count as a plateau; 0 is none."""


HTTP = ("https://", "http://")
"""URLs that get a message as JSON; others are Apprise's, such as mailto:// or slack://."""


class NotifyConfig(Section):
    """Messages about a run, see docs/how-to/boards.md."""

    command: list[str] = []
    """Program and arguments that get each message as JSON on standard input, on the job's first
    node."""
    webhook: UserPath | None = None
    """File with the URL to which each message is posted as JSON, or one of Apprise, which sends its
    text: mailto://, slack://, discord://, ...; only you may have read access."""
    on: list[News] = ["start", "requeue", "plateau", "failure", "finish"]
    """When to send one: the run begins, goes on after a requeue, gets no better, failed, is
    complete."""
    advanced: NotifyAdvanced = NotifyAdvanced()


class JobConfig(Section):
    """The common part of every job: a model, an actor that trains it, and a launcher."""

    name: Annotated[str, Field(pattern=NAME, max_length=200)]
    """Name of the run and of its Slurm job; if it is taken, `submit` adds a number: sort-2."""
    run_root: UserPath = Path("runs")
    """Parent of the run directory, on a file system that every node sees; unset is $RELAX_RUN_ROOT,
    then runs."""
    seed: NonNegative = 0
    """Root of every random stream of the run, including the order of the training prompts, which is
    drawn anew each epoch."""
    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    launch: LaunchConfig = LaunchConfig()
    resources: SharedResources = SharedResources()
    """Defaults for every `<component>.resources`, without `nodes`, `max_nodes` and `gpus`."""
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
        """First steps that train only the critic."""
        return 0

    @property
    @abstractmethod
    def temperature(self) -> float:
        """Temperature of the distribution whose logprobs are trained."""

    @model_validator(mode="after")
    def _ranks_fill_nodes(self) -> Self:
        nodes = self.actor.resources.nodes
        checks.check_ranks("the actor's ranks", self.actor.layout.world_size, nodes)
        return self


class RunConfig(JobConfig):
    """Reinforcement learning; `SftRunConfig` is the other kind of job."""

    prompts: PromptsConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    engines: Pools = {ROLLOUT: EnginePool()}
    """Pools of engines by name. `rollout` samples the training data; others serve those that
    name them."""
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

        Measured: 1e-7 to 1e-5 in float32, 0.007 to 0.036 in bfloat16 (see
        docs/explanation/benchmarks.md); models that differed in a scaling of RoPE or a head were
        0.9 to 2.8 apart.
        """
        if self.weights.advanced.max_logprob_gap is not None:
            return self.weights.advanced.max_logprob_gap
        args = self.rollout_pool.args
        few_bits = args.keys() & {"quantization", "kv_cache_dtype", "torchao_config"}
        if few_bits or self.weights.quantize != "none":
            return 0.5
        types = (self.model.dtype, str(args.get("dtype", self.model.dtype)))
        return max(_ROUNDING.get(dtype, 0.0) for dtype in types)

    @property
    def rollout_pool(self) -> EnginePool:
        """The engines that sample the training data, with the policy's weights."""
        return self.engines[ROLLOUT]

    @property
    def producers(self) -> list[str]:
        """Bus producers of the rollout tasks, by rank."""
        return [f"rollout-{rank}" for rank in range(self.rollout_pool.num_hosts)]

    @property
    def rollout_engines(self) -> list[str]:
        """Engines that the job starts with, in the order of their GPUs."""
        return self.engines_in(ROLLOUT)

    def engines_in(self, pool: str) -> list[str]:
        """Returns the engines that a pool starts with, in the order of their GPUs."""
        size = self.engines[pool]
        tasks = [f"{pool}-{rank}" for rank in range(size.num_hosts)]
        return [name for task in tasks for name in engines_of(task, size.engines_per_task)]

    def waits_for_eval(self, name: str) -> bool:
        """Whether training waits until this held-out set is sampled with one policy."""
        asked = self.eval[name].advanced.one_policy
        return self.rollout_pool.placement == "actor" if asked is None else asked

    @property
    def reference_model(self) -> ModelConfig:
        return self.reference.model(self.model)

    @property
    def reference_megatron(self) -> MegatronConfig:
        """Settings of a reference that is a separate component."""
        return self.reference.megatron(self.actor)

    @property
    def gamma(self) -> float:
        advantage = self.algorithm.advantage
        return advantage.gamma if isinstance(advantage, Gae) else 1.0

    @property
    def steps_of_critic_alone(self) -> int:
        """First steps that train only the critic."""
        return self.critic.warmup_steps if self.critic else 0

    @property
    def columns(self) -> frozenset[str]:
        """Columns for training besides those that rollout always writes."""
        measured = columns_of("reference") if self.reference.placement != "none" else {}
        routed = [ROUTED_EXPERTS] * self.replays_routing
        return frozenset({*self.reasons, *measured, *routed})

    @property
    def reasons(self) -> dict[str, str]:
        """Columns that the algorithm needs -> the setting that needs them."""
        found = dict(self.algorithm.needs.columns)
        if key := found.get(COLUMN):
            found |= dict.fromkeys(columns_by_teacher(self.teachers).values(), key)
        return found

    @property
    def replays_routing(self) -> bool:
        """Whether tokens are trained with the experts that the engine chose."""
        return bool(self.rollout.advanced.routed_experts)

    @property
    def tokens_per_portion(self) -> float:
        """Tokens of a batch that justify an early start."""
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
    def _sections_fit(self) -> Self:
        checks.check(self)
        return self


class SftConfig(Section):
    train: UserPath
    """Documents in JSON lines or Parquet, each with `messages`, or `prompt` and `completion`. A
    file, folder, pattern or slice, as in `prompts.train`."""
    heldout: UserPath | None = None
    """Documents that are not trained on; their loss is measured before, during and after
    training."""
    batch_size: Positive | None = None
    """Documents per step; set this or `tokens_per_step`."""
    tokens_per_step: Positive | None = None
    """A step takes documents, in their order, until the next one would exceed it."""
    num_steps: Positive | None = None
    """Batches to train on; training ends here or after `epochs`, whichever is first."""
    epochs: Positive | None = None
    """Passes over the documents; the last batch of the last one may be smaller."""
    shuffle_seed: NonNegative | None = 0
    """Seed of the documents' order, drawn anew each epoch; unset keeps the file's order."""
    chat_template: bool = True
    """Render prompt and completion as turns of the tokenizer's chat template; `messages` are always
    rendered."""
    max_tokens: Positive = 4096
    """Most tokens of a document; `too_long` decides about longer ones."""
    too_long: Literal["error", "truncate"] = "error"
    """error: refused before the job starts. truncate: its first `max_tokens` are kept, and counted;
    if none of them is trained on, it is left out."""
    heldout_every: NonNegative = 20
    """Steps between measurements of the held-out loss; 0 measures before and after only."""
    heldout_documents: Positive = 256
    """Held-out documents used, from the top of the file."""

    @model_validator(mode="after")
    def _says_how_much(self) -> Self:
        if (self.batch_size is None) == (self.tokens_per_step is None):
            raise ValueError("takes either batch_size or tokens_per_step; set one of them")
        if self.num_steps is None and self.epochs is None:
            raise ValueError("needs num_steps or epochs; set one of them")
        return self


class SftRunConfig(JobConfig):
    """Supervised fine-tuning by the actor alone."""

    sft: SftConfig

    @model_validator(mode="after")
    def _is_one_job(self) -> Self:
        if self.launch.layout != "hetjob":
            raise ValueError(
                f"launch.layout = {self.launch.layout!r}: supervised fine-tuning has no rollout to "
                "be apart from; use 'hetjob'"
            )
        if self.actor.advanced.keep_best is not None:
            raise ValueError(
                f"actor.advanced.keep_best = {self.actor.advanced.keep_best!r}: supervised "
                "fine-tuning has no [eval.NAME] to choose by; remove it"
            )
        return self

    @property
    def num_steps(self) -> int:
        assert self.sft.num_steps is not None, "submit counts the steps of the epochs"
        return self.sft.num_steps

    @property
    def epochs_per_step(self) -> int:
        return 1

    @property
    def temperature(self) -> float:
        return 1.0


def engines_of(task: str, count: int) -> list[str]:
    """Returns the names of a rollout task's engines."""
    return [task] if count == 1 else [f"{task}.{index}" for index in range(count)]
