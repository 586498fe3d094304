"""Configures the model, LoRA, layout, optimizer and checkpoints."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from relax_hpc.sections import (
    SETTINGS,
    NonNegative,
    Number,
    PassThrough,
    Positive,
    Section,
    UserPath,
)

LoraTarget = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
]  # fmt: skip


class ModelConfig(Section):
    path: UserPath
    """Hugging Face folder of a model in docs/reference/models.md: config.json, safetensors,
    tokenizer. Or its name on the hub, "Qwen/Qwen3-4B" or "Qwen/Qwen3-4B@revision":
    `relax-hpc fetch` brings it into the hub's cache, and the run keeps the commit found there."""
    weights: UserPath | None = None
    """A checkpoint, of a run or from `relax-hpc convert`, with initial weights that replace those
    in `path`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type in which engines and trainer compute; main gradients and Adam stay float32."""

    def beside(self, path: Path | None, weights: Path | None = None) -> "ModelConfig":
        """Returns another model of the job: at `path`, this one if unset."""
        known = {"path": path, "weights": weights} if path else {"weights": weights or self.weights}
        return self.model_copy(update=known)


class LoraConfig(Section):
    """Low-rank adaptation (arXiv:2106.09685): the model's weights stay fixed, and a learned product
    is added to its matrices, W + alpha / rank B A."""

    rank: NonNegative = 0
    """Rows of A and columns of B, for every matrix in `targets`; 0 trains the model itself."""
    alpha: Annotated[Number, Field(gt=0)] = 32.0
    """The product is multiplied by alpha / rank."""
    targets: Annotated[list[LoraTarget], Field(min_length=1)] = list(get_args(LoraTarget))
    """Adapted matrices of every layer, by Hugging Face's names. In a mixture of experts only those
    of the attention are allowed: q_proj, k_proj, v_proj, o_proj."""

    @model_validator(mode="after")
    def _rank_uses_it(self) -> Self:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if self.rank == 0 and value != field.default:
                raise ValueError(
                    f"{name} = {value}: means nothing with rank = 0; set a rank, e.g. 32, or "
                    f"remove {name}"
                )
        return self

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


FrozenPart = Literal["language", "vision", "vision_projection", "audio", "audio_projection"]


class Layout(Section):
    """How ranks share a model, and replicas share the trajectories."""

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

    @model_validator(mode="after")
    def _grid_fits(self) -> Self:
        experts, ranks = self.expert_parallel * self.expert_tensor_parallel, self.world_size
        if ranks // self.pipeline_parallel % experts:
            raise ValueError(
                f"expert_parallel x expert_tensor_parallel = {experts}: does not "
                f"divide the {ranks // self.pipeline_parallel} ranks of a pipeline stage"
            )
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"virtual_pipeline = {self.virtual_pipeline}: needs pipeline_parallel of 2 or more"
            )
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks; expert-parallel ranks are among them."""
        return self.replica_size * self.data_parallel

    @property
    def replica_size(self) -> int:
        """Ranks with the same trajectories."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether tensor-parallel ranks split the tokens between their matrices."""
        return self.tensor_parallel > 1

    @property
    def micro_batches_multiple_of(self) -> int:
        """Interleaved stages need rounds of as many micro-batches as there are stages."""
        return self.pipeline_parallel if self.virtual_pipeline > 1 else 1


class ActorAdvanced(Section):
    attention: Literal["auto", "cudnn", "varlen", "sdpa"] = "auto"
    """Kernel of packed attention; auto is the first one that works on the machine."""
    float32_logits: bool = False
    """Keep logits in float32 instead of rounding them to the weights' type."""
    recomputed_passes: list[Literal["norm", "swiglu"]] = ["norm", "swiglu"]
    """Outputs that are recomputed for the gradient instead of kept: saves a quarter of the
    activations of a dense layer for 1 % of the time. For more recomputation see `transformer`."""
    kept_logits_gib: Annotated[Number, Field(ge=0)] = 0.0
    """GiB of logits kept for the gradient; the rest is computed a second time."""
    tower_patches: Positive = 8192
    """Patches of images and videos that an encoder processes at a time, which bounds its
    activations. A token of sound counts as much as a token of pixels, 4 for Qwen."""
    features_gib: Annotated[Number, Field(ge=0)] | None = None
    """GiB of a GPU for the features of a portion's media, and their gradients. If they need more,
    all of them stay in host memory, and each micro-batch loads its own. Unset keeps them on the
    GPU."""
    portion_micro_batches: NonNegative | None = None
    """Training starts on a part of a batch once every data-parallel rank can fill this many
    micro-batches; 0 waits for the whole batch. The update is the same. Unset is 4, or the whole
    batch if the algorithm needs it."""
    keep_best: str | None = None
    """A name of [eval.NAME]: the checkpoint with the best score of that set is kept, whatever
    `keep_checkpoints` says. `eval.NAME.every` must be a multiple of `save_every`, so that each
    evaluated policy has a checkpoint. A score counts for the step at which it was due; a set with
    `one_policy` is sampled by that policy alone."""


class MegatronConfig(BaseModel):
    """All settings of a Megatron-core model besides the model itself."""

    model_config = SETTINGS
    _section: str = PrivateAttr(default="actor")

    layout: Layout = Layout()
    tokens_per_micro_batch: Positive = 16384
    """Token budget of one packed micro-batch; a longer trajectory is an error."""
    transformer: PassThrough = {}
    """Fields of Megatron-core's TransformerConfig, e.g. recompute_granularity = "full"."""
    advanced: ActorAdvanced = ActorAdvanced()

    @property
    def section(self) -> str:
        """Place of its keys in a job, for messages."""
        return self._section

    @property
    def owns_transformer(self) -> bool:
        """Whether `transformer` was set for this model and layout; else it is the actor's."""
        return self._section == "actor"

    def beside(self, section: str, layout: Layout | None) -> "MegatronConfig":
        """Returns the settings of another model: the same, with its own layout if set."""
        own = {key: getattr(self, key) for key in MegatronConfig.model_fields}
        found = MegatronConfig(**own | {"layout": layout or self.layout})
        found._section = section
        return found


class OptimizerConfig(BaseModel):
    model_config = SETTINGS

    lr: Annotated[Number, Field(gt=0)] = 1e-6
    """Adam's learning rate after the warm-up; `decay` sets how it falls."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up."""
    final_lr_fraction: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """Learning rate of the last step, as a fraction of `lr`; 1 does not decay."""
    decay: Literal["constant", "linear", "cosine", "sqrt"] = "linear"
    """Shape of the decay; `sqrt` falls fast at first (1 - sqrt of the decay's progress)."""
    decay_steps: NonNegative = 0
    """The decay covers this many last steps, after a constant rate (warm-up, stable, decay); 0
    covers all steps after the warm-up."""
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    """Decoupled (AdamW): weights shrink by lr x this in every update; biases and norms do not."""
    clip_grad: Annotated[Number, Field(ge=0)] = 1.0
    """Largest gradient norm; 0 does not clip."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Type of Adam's two moments; bfloat16 halves their memory and rounds stochastically."""
    offload: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """Fraction of the main parameters and moments kept in host memory. They pass through the GPU in
    every update, with bit-identical results."""
    megatron: PassThrough = {}
    """Further fields of Megatron-core's OptimizerConfig, e.g. adam_eps = 1e-15. Defaults here are
    adam_beta1 = 0.9 and adam_beta2 = 0.95."""
    ddp: PassThrough = {}
    """Fields of Megatron-core's DistributedDataParallelConfig, e.g. overlap_grad_reduce = true."""

    @model_validator(mode="after")
    def _constant_ends_where_it_is(self) -> Self:
        if self.decay == "constant" and self.final_lr_fraction != 1:
            raise ValueError(
                f"final_lr_fraction = {self.final_lr_fraction}: a constant rate does not fall; "
                "use linear, cosine or sqrt as decay, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _what_decays_has_an_end(self) -> Self:
        asked = f"decay = {self.decay!r}" if self.decay in ("cosine", "sqrt") else ""
        asked = asked or (f"decay_steps = {self.decay_steps}" if self.decay_steps else "")
        if asked and self.final_lr_fraction == 1:
            raise ValueError(
                f"{asked}: the rate would not fall, since final_lr_fraction is 1; set that, e.g. "
                "to 0 or 0.1, or remove it"
            )
        return self


_REMAINING: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Progress of the decay, 0 to 1 -> remaining fraction between `lr` and its end."""


def learning_rate(config: OptimizerConfig, step: int, num_steps: int, still: int = 0) -> float:
    """Rises linearly to `lr` at step `warmup_steps`, stays, and decays to its end at `num_steps`.

    Args:
        step: 1-based; beyond `num_steps` the rate stays where it ended.
        still: first steps without updates; the rest is a run of its own.
    """
    step, num_steps = step - still, num_steps - still
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    begin = max(config.warmup_steps, 1)
    if config.decay_steps:
        begin = max(begin, num_steps - config.decay_steps)
    progress = (step - begin) / (num_steps - begin) if num_steps > begin else 0.0
    left = _REMAINING[config.decay](min(max(progress, 0.0), 1.0))
    return config.lr * (config.final_lr_fraction + (1.0 - config.final_lr_fraction) * left)


def as_it_ran(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Adapts the section of a run submitted before a decay without an end was refused.

    Such a rate was constant, whatever its shape, and stays so.
    """
    has_shape = stored.get("decay") in ("cosine", "sqrt") or stored.get("decay_steps", 0)
    if not has_shape or stored.get("final_lr_fraction", 1.0) != 1.0:
        return dict(stored)
    return {**stored, "decay": "constant", "decay_steps": 0}


class SavingConfig(BaseModel):
    model_config = SETTINGS

    save_every: Positive = 10
    """Steps between checkpoints; shards are kept until the next one. Training goes on during a
    save, which uses a copy in host memory: about 14 bytes per parameter of the model, divided by
    the number of ranks."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints that are kept, to resume from."""
    keep_every: NonNegative = 0
    """Checkpoints whose step is a multiple of this are kept for good; 0 keeps none."""
    save_hf_every: NonNegative = 0
    """Steps between exports of the model as a Hugging Face folder, hf/step_<step>; 0 makes none."""
