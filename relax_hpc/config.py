"""One run, described once: hand-written TOML in, resolved JSON in the run directory out.

Reading a job never imports an engine: `engine_args`, `transformer` and `optimizer_args` are
pass-through tables, checked by the parsers of SGLang and Megatron-core before anything is queued.
"""

import math
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from relax_hpc.schema import COLUMNS

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]


def _no_table(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):  # said once, not for every type that it might have been
        raise ValueError("is a table; a number, a string, true, false or a list is expected")
    return value


PassThrough = dict[str, Annotated[bool | int | float | str | list[Any], BeforeValidator(_no_table)]]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    path: Path
    """Hugging Face folder of a dense Qwen3: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
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
    samples_per_prompt: Positive = 8
    """G, the siblings of a prompt group."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    max_new_tokens: Positive = 256
    max_running_requests: Positive = 256
    """Trajectories an engine decodes at once."""
    groups_per_shard: Positive = 16
    """A shard is published once it holds that many prompt groups, or when its batch is done."""
    start_timeout_s: Positive = 900
    """An engine that is not healthy after this many seconds fails its task."""
    engine_args: PassThrough = {}
    """Passed to the engine's own parser, e.g. mem_fraction_static = 0.8 for SGLang."""
    resources: Resources = Resources()


class OptimizerConfig(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-6
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up."""
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Learning rate of the last step, as a fraction of `lr`; 1 does not decay."""
    decay: Literal["linear", "cosine"] = "linear"
    """How it gets there after the warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Largest gradient norm; 0 does not clip."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Type of Adam's two moments; bfloat16 halves their memory and rounds stochastically."""
    offload: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the main parameters and moments kept in host memory. They pass through the GPU in
    every update, which is the same to the last bit."""


class ActorConfig(Section):
    tensor_parallel: Positive = 1
    """Ranks that share every matrix."""
    pipeline_parallel: Positive = 1
    """Stages that share the layers."""
    virtual_pipeline: Positive = 1
    """Chunks of layers per stage; several are interleaved (smaller bubble, more communication)."""
    context_parallel: Positive = 1
    """Ranks that share the tokens of a micro-batch."""
    expert_parallel: Positive = 1
    """Ranks that share the experts of a mixture-of-experts layer."""
    expert_tensor_parallel: Positive = 1
    """Ranks that share every expert's matrices."""
    data_parallel: Positive = 1
    """Replicas, each of tensor_parallel x pipeline_parallel x context_parallel ranks."""
    sequence_parallel: bool | None = None
    """Tensor-parallel ranks share the tokens, too; unset is on if there are several of them."""
    tokens_per_micro_batch: Positive = 16384
    """Budget of one packed micro-batch; a longer trajectory is an error."""
    portion_micro_batches: NonNegative = 4
    """Training starts on a part of a batch once every data-parallel rank can fill this many
    micro-batches; 0 waits for the whole batch. The update is the same."""
    save_every: Positive = 10
    """Steps between checkpoints; shards are kept until the next one."""
    keep_checkpoints: Positive = 2
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
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _grid_fits(self) -> Self:
        experts, ranks = self.expert_parallel * self.expert_tensor_parallel, self.world_size
        if ranks // self.pipeline_parallel % experts:
            raise ValueError(
                f"actor.expert_parallel x expert_tensor_parallel = {experts}: does not divide the "
                f"{ranks // self.pipeline_parallel} ranks of a pipeline stage"
            )
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"actor.virtual_pipeline = {self.virtual_pipeline}: needs "
                "actor.pipeline_parallel of 2 or more"
            )
        return self

    @property
    def world_size(self) -> int:
        """Ranks; those of expert parallelism are among them."""
        return self.replica_size * self.data_parallel

    @property
    def replica_size(self) -> int:
        """Ranks that train on the same trajectories."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def micro_batches_multiple_of(self) -> int:
        """Interleaved stages take turns in rounds of as many micro-batches as there are stages."""
        return self.pipeline_parallel if self.virtual_pipeline > 1 else 1

    @property
    def tokens_per_portion(self) -> float:
        """Tokens of a batch that are worth starting on before the rest is there."""
        if not self.portion_micro_batches:
            return math.inf
        room = self.data_parallel * self.tokens_per_micro_batch * self.portion_micro_batches
        return 0.95 * room  # rows seldom fill it to the last token; more would open another one


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

    @model_validator(mode="after")
    def _groups_need_siblings(self) -> Self:
        if self.rollout.samples_per_prompt < 2:
            raise ValueError(
                f"rollout.samples_per_prompt = {self.rollout.samples_per_prompt}: "
                f"{self.algorithm.name} compares siblings of a prompt; use 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _engines_fill_nodes(self) -> Self:
        rollout = self.rollout
        _check_nodes("rollout.num_engines", rollout.num_engines, rollout.resources.nodes)
        return self


def _check_nodes(key: str, tasks: int, nodes: int) -> None:
    if tasks % nodes:
        raise ValueError(
            f"{key} = {tasks}: does not divide over {nodes} nodes; "
            f"use a multiple of {nodes}, or change resources.nodes"
        )
