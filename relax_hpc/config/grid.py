"""The layout of a model over ranks."""

from typing import ClassVar, Self

from pydantic import BaseModel, model_validator

from relax_hpc.config.sections import SETTINGS, Positive


class GridConfig(BaseModel):
    """How ranks share a model, and replicas of it the trajectories."""

    model_config = SETTINGS
    _section: ClassVar[str]

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

    @model_validator(mode="after")
    def _grid_fits(self) -> Self:
        experts, ranks = self.expert_parallel * self.expert_tensor_parallel, self.world_size
        if ranks // self.pipeline_parallel % experts:
            raise ValueError(
                f"{self._section}.expert_parallel x expert_tensor_parallel = {experts}: does not "
                f"divide the {ranks // self.pipeline_parallel} ranks of a pipeline stage"
            )
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"{self._section}.virtual_pipeline = {self.virtual_pipeline}: needs "
                f"{self._section}.pipeline_parallel of 2 or more"
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
    def micro_batches_multiple_of(self) -> int:
        """Interleaved stages take turns in rounds of as many micro-batches as there are stages."""
        return self.pipeline_parallel if self.virtual_pipeline > 1 else 1
