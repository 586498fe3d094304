"""An engine as it is to be started: all that its process has to be told about what it computes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from relax_hpc.sections import PassThrough

Kind = Literal["embedded", "sglang"]
Quantization = dict[str, Any]
"""The `quantization_config` of a model's config.json."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The settings of an engine: its model and its limits."""

    kind: Kind
    model_path: Path
    """Hugging Face folder."""
    dtype: str = "float32"
    """ "float32", "bfloat16" or "float16"."""
    args: PassThrough = field(default_factory=dict)
    """Arguments that the engine's own parser checks."""
    seed: int = 0
    """Seed of the engine's own random numbers, where requests bring none."""
    max_running_requests: int = 256
    start_timeout_s: float = 900
    nodes: int = 1
    """Nodes that it spans."""
    routed_experts: bool = False
    """Replies say which experts each token went to."""
    quantization: Quantization | None = None
    """Quantisation of SGLang's weights, which are garbage until an update then."""
    pool: str = "rollout"
    """Named in messages: the settings are those of `[engines.POOL]`."""
