"""Shapes of models that can be measured without their weights."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from relax_hpc.errors import ConfigError

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
    "vocab_size": 151936, "head_dim": 128,
    "num_key_value_heads": 8, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728,
                          "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-1.7b": _QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144,
                            "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-0.6b": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072,
                            "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-30b-a3b": _QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"],
                               "model_type": "qwen3_moe", "hidden_size": 2048,
                               "intermediate_size": 6144, "moe_intermediate_size": 768,
                               "num_experts": 128, "num_experts_per_tok": 8,
                               "norm_topk_prob": True, "decoder_sparse_step": 1,
                               "mlp_only_layers": [], "router_aux_loss_coef": 1e-3,
                               "num_hidden_layers": 48, "num_attention_heads": 32,
                               "num_key_value_heads": 4, "tie_word_embeddings": False},
    "tiny": _QWEN3 | {"vocab_size": 512, "head_dim": 16, "num_key_value_heads": 2,
                      "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
                      "num_attention_heads": 4},
}  # fmt: skip
"""config.json of what can be measured; the tiny ones are for machines without a GPU."""

_EXPERTS = ("architectures", "model_type", "num_experts_per_tok", "norm_topk_prob",
            "decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef")  # fmt: skip
SHAPES["tiny-moe"] = SHAPES["tiny"] | {
    **{key: SHAPES["qwen3-30b-a3b"][key] for key in _EXPERTS},
    "moe_intermediate_size": 64, "num_experts": 16, "tie_word_embeddings": False,
}  # fmt: skip


def users_folder(shape: str, shapes: Collection[str]) -> Path | None:
    """Returns the folder of the user's model; None where `shape` is one of `shapes`.

    Raises:
        ConfigError: it is neither.
    """
    if (Path(shape) / "config.json").is_file():
        return Path(shape)
    if shape not in shapes:
        raise ConfigError(
            f"--shape {shape}: is none of {', '.join(shapes)}, nor a folder with a config.json"
        )
    return None


def model_folder(shape: str, folder: Path) -> Path:
    """Returns the folder of the model's config.json: one of the user's, or written to `folder`."""
    if found := users_folder(shape, SHAPES):
        return found
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return folder
