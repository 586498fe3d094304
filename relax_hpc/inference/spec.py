"""Describes an engine to start: its model, arguments and limits."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from relax_hpc.sections import PassThrough

Quantization = dict[str, Any]
"""The `quantization_config` of a model's config.json."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    kind: Literal["embedded", "sglang"]
    model_path: Path
    dtype: str = "float32"
    """ "float32", "bfloat16" or "float16"."""
    args: PassThrough = field(default_factory=dict)
    """Arguments, checked by the engine's own parser."""
    seed: int = 0
    """Seed of the engine's own random numbers, if requests have none."""
    max_running_requests: int = 256
    start_timeout_s: float = 900
    nodes: int = 1
    routed_experts: bool = False
    """Whether replies have each token's routed experts."""
    quantization: Quantization | None = None
    """Quantisation of SGLang's weights, which then are garbage until an update."""
    pool: str = "rollout"


class NodeShare(NamedTuple):
    """One process's part of an engine over several nodes."""

    nodes: int = 1
    rank: int = 0
    address: str = ""
    """"host:port" of the first node, where the parts meet; unused on one node."""


ALONE = NodeShare()
