"""The model, and its low-rank adaptation."""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from relax_hpc.sections import NonNegative, Number, Section, UserPath

LoraTarget = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
]  # fmt: skip


class ModelConfig(Section):
    path: UserPath
    """Hugging Face folder of a model in docs/models.md: config.json, safetensors, tokenizer."""
    weights: UserPath | None = None
    """A checkpoint, of a run or made by `relax-hpc convert`, whose weights the trainer starts with
    instead of those in `path`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type the engines and the trainer compute in; main gradients and Adam stay float32."""


class LoraConfig(Section):
    """Low-rank adaptation (arXiv:2106.09685): the model's weights stay what they are, and what
    learns is added to its matrices, W + alpha / rank B A."""

    rank: NonNegative = 0
    """Rows of A and columns of B, of every matrix in `targets`; 0 trains the model itself."""
    alpha: Annotated[Number, Field(gt=0)] = 32.0
    """Weight of the product: it is multiplied by alpha / rank."""
    targets: Annotated[list[LoraTarget], Field(min_length=1)] = list(get_args(LoraTarget))
    """Matrices of every layer that are adapted, by Hugging Face's names. In a mixture of experts
    those of the attention can be: q_proj, k_proj, v_proj, o_proj."""

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
        """Returns the factor of the product."""
        return self.alpha / self.rank
