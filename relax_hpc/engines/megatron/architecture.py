"""What a Hugging Face config.json says about the model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_hpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Architecture:
    """What config.json of a dense Qwen3 says."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope_base: float
    attention_bias: bool
    tied_embeddings: bool


def read_architecture(folder: Path) -> Architecture:
    """Reads config.json of a Hugging Face folder.

    Raises:
        ConfigError: no such file, or a model that is not a dense Qwen3 with plain rotary positions.
    """
    path = folder / "config.json"
    try:
        hf: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"model.path = {folder}: has no config.json") from None
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    for key, value, known in (
        ("model_type", hf.get("model_type"), "qwen3"),
        ("hidden_act", hf.get("hidden_act", "silu"), "silu"),
        ("rope type", rope_type, "default"),
        ("use_sliding_window", hf.get("use_sliding_window", False), False),
    ):
        if value != known:
            raise ConfigError(f"{path}: {key} = {value!r}: only {known!r} is supported")
    return Architecture(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        vocab_size=hf["vocab_size"],
        max_positions=hf["max_position_embeddings"],
        norm_epsilon=hf["rms_norm_eps"],
        rope_base=float(rope.get("rope_theta") or hf.get("rope_theta", 10000.0)),
        attention_bias=bool(hf.get("attention_bias", False)),
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )
