"""The model."""

from typing import Literal

from relax_hpc.sections import Section, UserPath


class ModelConfig(Section):
    path: UserPath
    """Hugging Face folder of a model in docs/models.md: config.json, safetensors, tokenizer."""
    weights: UserPath | None = None
    """A checkpoint, of a run or made by `relax-hpc convert`, whose weights the trainer starts with
    instead of those in `path`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type the engines and the trainer compute in; main gradients and Adam stay float32."""
