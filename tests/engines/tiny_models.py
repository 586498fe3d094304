"""Tiny models of every family by their config.json, and three that compute their logprobs."""

import json

import numpy as np
import torch
from hf_logprobs import hf_logprobs
from trainers import VOCAB, assert_close, collect, opened, trajectories

from relax_hpc.inference.embedded.model import Decoder, KvCache, ModelShape

BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": 3, "intermediate_size": 48, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "rope_theta": 20000.0, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16,
    "low_freq_factor": 0.25, "high_freq_factor": 1.0,
}  # fmt: skip
FAMILIES = {
    "llama": BASE
    | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3},
    "mistral": BASE
    | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64},
    "qwen3": BASE | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen2": BASE | {"model_type": "qwen2"},
    "qwen3_moe": BASE | EXPERTS,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SAVED = {"rope_type": "default", "rope_theta": 20000.0}  # as transformers 5 saves it


def make(folder, family, saving=(), **changes):
    """Random weights, norms and biases too, so that what is left out is noticed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write(folder, family, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3 if "norm" in name or "bias" in name else 0.15)
            if "norm" in name:
                parameter.add_(1)
    model.save_pretrained(folder, **dict(saving))
    return write(folder, family, **changes)


def write(folder, family, **changes):
    record = FAMILIES[family] | changes
    record = {key: value for key, value in record.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(record))
    return folder


def linked(folder, source, family, **changes):
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    return write(folder, family, **changes)


ROWS, _ = trajectories(3, longest=60)


def by_transformers(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [hf_logprobs(model, row.token_ids).numpy() for row in ROWS]


def by_engine(folder):
    """Returns the logprob of every token, one by one, with the cache."""
    model = Decoder(ModelShape.read(folder), torch.float32, torch.device("cpu"))
    model.load_folder(folder)
    found = []
    for row in ROWS:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        cache, slot = KvCache(model.shape, torch.float32, torch.device("cpu")), torch.tensor([0])
        cache.reserve(1, len(ids))
        half = len(ids) // 2
        logits = [model.prefill(ids[None, :half], cache, slot, slot)]
        for at in range(half, len(ids) - 1):
            logits.append(model.decode(ids[None, at], torch.tensor([at]), cache, at + 1))
        table = torch.cat(logits).log_softmax(-1)
        found.append(table.gather(1, ids[half:, None])[:, 0].numpy())
    return found


def check(ranks, folder, expected, *, engine):
    assert_close(collect(opened(ranks, folder).logprobs(rows=ROWS)), expected)
    if engine:
        found = by_engine(folder)
        ends = [theirs[-len(mine) :] for mine, theirs in zip(found, expected, strict=True)]
        assert_close(found, ends)


def distance(found, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(found, other, strict=True))
