"""Small checkpoints of zeros, right or wrong."""

import json

import numpy as np
from safetensors.numpy import save_file

from relax_hpc.trainer.models import registry

QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8, "rms_norm_eps": 1e-6,
    "head_dim": 2,
    "max_position_embeddings": 64, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 6, "tie_word_embeddings": False,
}  # fmt: skip
INDEX = "model.safetensors.index.json"


def tensors(folder):
    """As config.json says, zeros."""
    made = {}
    for parameter in registry.parameters(registry.read_architecture(folder)):
        shapes = list(parameter.hf.values()) * (parameter.num_experts or 1)
        for name, shape in zip(parameter.names(), shapes, strict=True):
            made[name] = np.zeros(shape, np.float16)
    return made


def save(folder, weights, num_files):
    if num_files == 1:
        save_file(weights, folder / "model.safetensors")
        return
    weight_map = {}
    for number in range(num_files):
        names = list(weights)[number::num_files]
        save_file({name: weights[name] for name in names}, folder / f"{number}.safetensors")
        weight_map |= dict.fromkeys(names, f"{number}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def write(folder, config, change=None, num_files=1):
    """A folder whose tensors were changed after config.json was written."""
    (folder / "config.json").write_text(json.dumps(config))
    weights = tensors(folder)
    if change:
        change(weights)
    save(folder, weights, num_files)
    return folder
