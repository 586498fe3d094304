"""One run, described once: hand-written TOML in, resolved JSON in the run directory out.

Reading a job never imports an engine: `engine_args`, `transformer`, `ddp` and `optimizer.megatron`
are pass-through tables, checked by SGLang's parser and Megatron-core's classes before anything is
queued.
"""

import math
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator

from relax_hpc.config_grid import SETTINGS, GridConfig, NonNegative, PassThrough, Positive
from relax_hpc.config_optimizer import OptimizerConfig
from relax_hpc.schema import COLUMNS, Role


class Section(BaseModel):
    model_config = SETTINGS


class ModelConfig(Section):
    path: Path
    """Hugging Face folder of a model in docs/models.md: config.json, safetensors, tokenizer."""
    weights: Path | None = None
    """A checkpoint, of a run or made by `relax-hpc convert`, whose weights the trainer starts with
    instead of those in `path`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type the engines and the trainer compute in; main gradients and Adam stay float32."""


class PromptsConfig(Section):
    train: Path
    """JSON lines, each with `prompt` (text or chat messages) and `answer`."""
    heldout: Path
    """Prompts nothing is trained on; scored before, during and after."""
    shuffle_seed: int | None = 0
    """Order of the training prompts, drawn anew each epoch; unset keeps the file's order."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template."""
    max_prompt_tokens: Positive = 1024
    """A longer prompt is an error before the job starts."""


class RewardConfig(Section):
    name: Literal["boxed_number", "coin"] = "boxed_number"
    """Which verifier scores a response; `coin` scores by a hash, to exercise random weights."""


class Resources(Section):
    """What one component asks Slurm for. Unset fields come from the site profile, then Slurm."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    nodes: Positive = 1
    max_nodes: Positive | None = None
    """Nodes that rollout holds; those beyond `nodes` are idle until `relax-hpc scale out`."""
    gpus_per_node: NonNegative = 0
    cpus_per_task: Positive | None = None
    mem: str | None = None
    """Memory per node, as Slurm writes it: "64G". Give every component one or none."""
    time: str | None = None
    """Slurm time limit, "D-HH:MM:SS" or minutes; the rollout component's ends the whole job."""
    constraint: str | None = None
    mpi: str | None = None
    """`srun --mpi`: pmix for Open MPI, pmi2 for MPICH; unset takes the profile's, then none."""
    python: str | None = None
    """Interpreter of this component; unset is the one that submits."""
    setup: list[str] = []
    """Shell lines before the step: `module load ...`, `conda activate ...`."""
    sbatch: list[str] = []
    """Further #SBATCH options, e.g. "--exclusive"."""
    srun: list[str] = []
    """Further srun options."""


class RolloutConfig(Section):
    engine: Literal["embedded", "sglang"] = "embedded"
    """`sglang` is the production engine; `embedded` runs anywhere torch does."""
    num_engines: Positive = 1
    """Engines of the core job; each is one task of the component, one bus producer."""
    nodes_per_engine: Positive = 1
    """Above 1, an engine spans that many nodes, with one task on each; `engine` is sglang then."""
    samples_per_prompt: Positive = 8
    """G, the siblings of a prompt group."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    max_new_tokens: Positive = 256
    max_running_requests: Positive = 256
    """Trajectories an engine decodes at once."""
    groups_per_shard: Positive = 16
    """A shard is published once it holds that many prompt groups, its batch is done, or its first
    group has waited for a second."""
    over_sampling: Annotated[float, Field(ge=0)] = 0.0
    """Fraction of a batch that is sampled beyond what `algorithm.max_staleness` admits, so that
    groups that are ready take the place of stragglers; needs `algorithm.over_age` drop or mask."""
    start_timeout_s: Positive = 900
    """An engine that is not healthy after this many seconds has failed to start."""
    hang_timeout_s: Positive = 120
    """An engine that says nothing for this many seconds, outside an update, is started again."""
    restart_window_s: Positive = 1800
    """An engine that has to be started again more than `launch.max_restarts` times within this many
    seconds fails its task."""
    engine_args: PassThrough = {}
    """Passed to the engine's own parser, e.g. mem_fraction_static = 0.8 for SGLang."""
    resources: Resources = Resources()

    @property
    def num_tasks(self) -> int:
        return self.num_engines * self.nodes_per_engine

    @model_validator(mode="after")
    def _spans_nodes(self) -> Self:
        if self.nodes_per_engine == 1:
            return self
        if self.engine != "sglang":
            raise ValueError(
                f"rollout.nodes_per_engine = {self.nodes_per_engine}: the embedded engine is one "
                "process; use rollout.engine = 'sglang', or 1"
            )
        if self.resources.nodes != self.num_tasks:
            raise ValueError(
                f"rollout.nodes_per_engine = {self.nodes_per_engine}: {self.num_engines} engines "
                f"take {self.num_tasks} nodes of their own; set rollout.resources.nodes to it"
            )
        return self


class ActorConfig(Section, GridConfig):
    _section: ClassVar[str] = "actor"

    tokens_per_micro_batch: Positive = 16384
    """Budget of one packed micro-batch; a longer trajectory is an error."""
    portion_micro_batches: NonNegative = 4
    """Training starts on a part of a batch once every data-parallel rank can fill this many
    micro-batches; 0 waits for the whole batch. The update is the same."""
    max_skipped_updates: Positive = 3
    """An update whose loss or gradient is not finite is skipped; as many in a row stop the run."""
    save_every: Positive = 10
    """Steps between checkpoints; shards are kept until the next one."""
    keep_checkpoints: Positive = 2
    """The newest ones, which a run can be resumed from."""
    keep_every: NonNegative = 0
    """A checkpoint whose step is a multiple of it is kept for good; 0 keeps none."""
    async_save: bool = True
    """Train on while a checkpoint is written. It takes host memory for a copy of what a rank saves:
    about 14 bytes per parameter of the model, divided by the number of ranks."""
    save_hf_every: NonNegative = 0
    """Steps between exports of the model as a Hugging Face folder, hf/step_<step>; 0 makes none."""
    attention: Literal["auto", "cudnn", "varlen", "sdpa"] = "auto"
    """Kernel of packed attention; auto is the first of them that works on the machine."""
    float32_logits: bool = False
    """Do not round logits to the type of the weights."""
    recomputed_passes: list[Literal["norm", "swiglu"]] = ["norm", "swiglu"]
    """Outputs that are made again for the gradient instead of kept: a quarter of the activations of
    a dense layer for 1 % of the time. What else is recomputed, `transformer` says."""
    kept_logits_gib: Annotated[float, Field(ge=0)] = 0.0
    """Logits of this size are kept for the gradient; what is beyond is computed a second time."""
    optimizer: OptimizerConfig = OptimizerConfig()
    transformer: PassThrough = {}
    """Fields of Megatron-core's TransformerConfig, e.g. recompute_granularity = "full"."""
    ddp: PassThrough = {}
    """Fields of its DistributedDataParallelConfig, e.g. overlap_grad_reduce = true."""
    resources: Resources = Resources()

    @property
    def tokens_per_portion(self) -> float:
        """Tokens of a batch that are worth starting on before the rest is there."""
        if not self.portion_micro_batches:
            return math.inf
        room = self.data_parallel * self.tokens_per_micro_batch * self.portion_micro_batches
        return 0.95 * room  # rows seldom fill it to the last token; more would open another one


class ReferenceConfig(Section, GridConfig):
    """The policy that the KL term compares with; its grid counts with placement "own" only."""

    _section: ClassVar[str] = "reference"

    placement: Literal["none", "actor", "own"] = "none"
    """Who computes ref_logprobs. actor: the trainer, which swaps its weights with a copy in host
    memory. own: a component of its own, `resources` says where. none: there is no reference."""
    path: Path | None = None
    """Hugging Face folder of the reference; unset is model.path, the policy before the first step.
    Of the same tokenizer, and with placement "actor" of the same shape."""
    refresh_every: NonNegative = 0
    """Steps after which the current policy becomes the reference; 0 never. Placement "actor"."""
    tokens_per_micro_batch: Positive | None = None
    """As the actor's, which it is if unset. Placement "own"."""
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _placement_uses_it(self) -> Self:
        of = {"path": ("actor", "own"), "refresh_every": ("actor",)}
        for name in type(self).model_fields:
            value, places = getattr(self, name), of.get(name, ("own",))
            unset = value == type(self).model_fields[name].default
            if name != "placement" and not unset and self.placement not in places:
                raise ValueError(
                    f"reference.{name} = {value}: means nothing with reference.placement = "
                    f"{self.placement!r}; remove it, or use {' or '.join(map(repr, places))}"
                )
        return self


class AlgorithmConfig(Section):
    name: Literal["grpo"] = "grpo"
    num_steps: Positive
    """Batches to train on; step b turns policy b-1 into policy b."""
    prompts_per_step: Positive = 32
    """Prompt groups of one batch."""
    max_staleness: NonNegative = 1
    """Policy versions a sampled token may lag behind: 0 is on-policy, 1 overlaps one step."""
    over_age: Literal["wait", "drop", "mask"] = "wait"
    """Which prompt groups make up a batch. wait: its own, so no token is ever over age. drop: those
    that are ready; a group that grew older than max_staleness is sampled again. mask: likewise, but
    it is trained on, and its over-age tokens leave the loss."""
    normalize_std: bool = False
    """Divide advantages by the group's standard deviation (GRPO); off is Dr. GRPO."""
    epochs_per_step: Positive = 1
    """Passes over a batch, each an optimizer update; the ratio is to the policy before them."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip: ratio >= 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Upper clip: ratio <= 1 + clip_high (clip-higher)."""
    importance_cap: Annotated[float, Field(gt=0)] = 2.0
    """Truncated importance sampling: weight min(pi_old / mu, cap) per token."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the reference in the loss; above 0 needs a reference."""


class BusConfig(Section):
    keep_steps: NonNegative = 0
    """Steps whose shards are kept longer than any resume needs them, to be replayed or exported."""
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


class WeightsConfig(Section):
    transport: Literal["collective", "files"] = "collective"
    """`collective` broadcasts (NCCL or gloo); `files` goes through the run directory."""
    bucket_bytes: Positive = 1 << 30
    """Tensors are sent in flat buckets of at most this size."""
    checksum_every: NonNegative = 10
    """Steps between comparisons of the engines' weights with the trainer's; 0 only at the end."""
    timeout_s: Positive = 300
    """An engine that does not take an update within this time is fenced."""


class EvalConfig(Section):
    every: NonNegative = 20
    """Steps between held-out evaluations; 0 evaluates before and after only."""
    num_prompts: Positive = 256
    """Held-out prompts used, from the top of the file."""


class LaunchConfig(Section):
    bootstrap: Literal["auto", "mpi", "files"] = "auto"
    """How ranks of a component find each other; auto is mpi when `resources.mpi` is set."""
    profile: str | None = None
    """Site profile: a name in slurm/profiles, or a path to a TOML file."""
    max_restarts: NonNegative = 3
    """Times a component whose step failed is started again in place."""
    restart_delay_s: Annotated[float, Field(ge=0)] = 2.0
    peer_timeout_s: Positive = 1800
    """How long a role waits for another before it gives up, naming it."""


class JobConfig(Section):
    """What every job has: a model, an actor that trains it, and a launcher."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run and of its Slurm job; a run directory is used once."""
    run_root: Path = Path("runs")
    """The run directory is made below this one, on a file system every node sees."""
    seed: int = 0
    """Root of every random stream of the run."""
    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    launch: LaunchConfig = LaunchConfig()

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
    @abstractmethod
    def temperature(self) -> float:
        """Of the distribution whose logprobs are trained."""

    @model_validator(mode="after")
    def _ranks_fill_nodes(self) -> Self:
        ranks = "the actor's ranks (tensor x pipeline x context x data_parallel)"
        _check_nodes(ranks, self.actor.world_size, self.actor.resources.nodes)
        return self


class RunConfig(JobConfig):
    """Reinforcement learning; `config_sft.SftRunConfig` is the other kind of job."""

    prompts: PromptsConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    reference: ReferenceConfig = ReferenceConfig()
    algorithm: AlgorithmConfig
    bus: BusConfig = BusConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()

    @property
    def num_steps(self) -> int:
        return self.algorithm.num_steps

    @property
    def epochs_per_step(self) -> int:
        return self.algorithm.epochs_per_step

    @property
    def temperature(self) -> float:
        return self.rollout.temperature

    @property
    def producers(self) -> list[str]:
        """Names of the bus producers; producer r owns the prompt ordinals p with p % R == r."""
        return [f"rollout-{rank}" for rank in range(self.rollout.num_engines)]

    @property
    def sidecar_writers(self) -> dict[str, Role]:
        """Names and roles of those that add columns to what the producers commit."""
        return {"reference-0": "reference"} if self.reference.placement == "own" else {}

    @property
    def of_reference(self) -> Self:
        """The run with the reference in the actor's place: its model and its grid."""
        its, actor = self.reference, self.actor
        grid: dict[str, Any] = {name: getattr(its, name) for name in GridConfig.model_fields}
        grid["tokens_per_micro_batch"] = its.tokens_per_micro_batch or actor.tokens_per_micro_batch
        model = self.model.model_copy(update={"path": its.path or self.model.path})
        return self.model_copy(update={"model": model, "actor": actor.model_copy(update=grid)})

    @model_validator(mode="after")
    def _kl_needs_reference(self) -> Self:
        if self.algorithm.kl_coefficient and self.reference.placement == "none":
            raise ValueError(
                f"algorithm.kl_coefficient = {self.algorithm.kl_coefficient}: needs a reference; "
                "set reference.placement to 'actor' or 'own'"
            )
        return self

    @model_validator(mode="after")
    def _over_sampling_needs_free_batches(self) -> Self:
        if self.rollout.over_sampling and self.algorithm.over_age == "wait":
            raise ValueError(
                f"rollout.over_sampling = {self.rollout.over_sampling}: needs batches of the first "
                "that are ready; set algorithm.over_age to 'drop' or 'mask'"
            )
        return self

    @model_validator(mode="after")
    def _groups_need_siblings(self) -> Self:
        if self.rollout.samples_per_prompt < 2:
            raise ValueError(
                f"rollout.samples_per_prompt = {self.rollout.samples_per_prompt}: "
                f"{self.algorithm.name} compares siblings of a prompt; use 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _tasks_fill_nodes(self) -> Self:
        rollout = self.rollout
        _check_nodes("rollout.num_engines", rollout.num_tasks, rollout.resources.nodes)
        ranks = "the reference's ranks (tensor x pipeline x context x data_parallel)"
        _check_nodes(ranks, self.reference.world_size, self.reference.resources.nodes)
        return self


def _check_nodes(key: str, tasks: int, nodes: int) -> None:
    if tasks % nodes:
        raise ValueError(
            f"{key} = {tasks}: does not divide over {nodes} nodes; "
            f"use a multiple of {nodes}, or change resources.nodes"
        )
