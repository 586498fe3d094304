"""The layout of a model: how ranks share it, and how they compute it."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator

from relax_hpc.sections import SETTINGS, Number, PassThrough, Positive, Section

FrozenPart = Literal["language", "vision", "vision_projection", "audio", "audio_projection"]


class Layout(Section):
    """The layout of a model over ranks, and of the trajectories over replicas of it."""

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
        """Ranks; those of expert parallelism are among them."""
        return self.replica_size * self.data_parallel

    @property
    def replica_size(self) -> int:
        """Ranks that are given the same trajectories."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether tensor-parallel ranks share the tokens between their matrices."""
        return self.tensor_parallel > 1

    @property
    def micro_batches_multiple_of(self) -> int:
        """Interleaved stages take turns in rounds of as many micro-batches as there are stages."""
        return self.pipeline_parallel if self.virtual_pipeline > 1 else 1


class MegatronConfig(BaseModel):
    """All that a model on Megatron-core needs to know besides which model it is."""

    model_config = SETTINGS
    section: ClassVar[str]
    """Place of its keys in a job, for messages."""

    layout: Layout = Layout()
    tokens_per_micro_batch: Positive = 16384
    """Budget of one packed micro-batch; a longer trajectory is an error."""
    attention: Literal["auto", "cudnn", "varlen", "sdpa"] = "auto"
    """Kernel of packed attention; auto is the first of them that works on the machine."""
    float32_logits: bool = False
    """Do not round logits to the type of the weights."""
    recomputed_passes: list[Literal["norm", "swiglu"]] = ["norm", "swiglu"]
    """Outputs that are made again for the gradient instead of kept: a quarter of the activations of
    a dense layer for 1 % of the time. What else is recomputed, `transformer` says."""
    kept_logits_gib: Annotated[Number, Field(ge=0)] = 0.0
    """Logits of this size are kept for the gradient; what is beyond is computed a second time."""
    tower_patches: Positive = 8192
    """Patches of images and videos that a tower encodes at a time; what it keeps for the gradient
    is of so many. A token of sound counts as a token of pixels does, 4 of Qwen's."""
    features_gib: Annotated[Number, Field(ge=0)] | None = None
    """GiB that the features of a portion's media, and their gradients, may take of a GPU. If they
    take more, all of them lie in host memory, and each micro-batch brings those that it sees. If it
    is not set, they lie on the GPU."""
    transformer: PassThrough = {}
    """Fields of Megatron-core's TransformerConfig, e.g. recompute_granularity = "full"."""
