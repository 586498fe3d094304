"""The optimizer's section of a job."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from relax_hpc.sections import SETTINGS, NonNegative, Number, PassThrough


class OptimizerConfig(BaseModel):
    model_config = SETTINGS

    lr: Annotated[Number, Field(gt=0)] = 1e-6
    """Adam's learning rate after the warm-up; `decay` says how it falls."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up."""
    final_lr_fraction: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """Learning rate of the last step, as a fraction of `lr`; 1 does not decay."""
    decay: Literal["constant", "linear", "cosine", "sqrt"] = "linear"
    """Shape of the decay; `sqrt` falls fast at first (1 - sqrt of the decay's progress)."""
    decay_steps: NonNegative = 0
    """The decay takes the last steps, that many, and the rate stays before (warm-up, stable,
    decay); 0 takes all steps after the warm-up."""
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    """Decoupled (AdamW): weights shrink by lr x this in every update; biases and norms do not."""
    clip_grad: Annotated[Number, Field(ge=0)] = 1.0
    """Largest gradient norm; 0 does not clip."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Type of Adam's two moments; bfloat16 halves their memory and rounds stochastically."""
    offload: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """Fraction of the main parameters and moments kept in host memory. They pass through the GPU in
    every update, which is the same to the last bit."""
    megatron: PassThrough = {}
    """Further fields of Megatron-core's OptimizerConfig, e.g. adam_eps = 1e-15. Without them
    adam_beta1 is 0.9 and adam_beta2 0.95."""
    ddp: PassThrough = {}
    """Fields of its DistributedDataParallelConfig, e.g. overlap_grad_reduce = true."""

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


def as_it_ran(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section of a run that was submitted before a decay to nowhere was refused.

    Such a rate was constant, whatever its shape was called, and is so in what is returned.
    """
    has_shape = stored.get("decay") in ("cosine", "sqrt") or stored.get("decay_steps", 0)
    if not has_shape or stored.get("final_lr_fraction", 1.0) != 1.0:
        return dict(stored)
    return {**stored, "decay": "constant", "decay_steps": 0}
