"""Quantised weights meet SGLang's own loader, of a model that was told of them as engines are."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from relax_hpc.cli.demo import models
from relax_hpc.inference.sglang import launch

SHAPE = {
    "vocab_size": 128, "hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
TEXT = SHAPE | {
    "rope_parameters": models.TEXT["rope_parameters"] | {"mrope_section": [12, 10, 10]},
    "vocab_size": models.TEXT["vocab_size"],
}
TOWERS = ("visual.", "audio_tower.")


def save(kind, folder, monkeypatch):
    torch.manual_seed(0)
    if kind == "dense":
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
        return
    if kind == "experts":
        config = Qwen3MoeConfig(**SHAPE, **EXPERTS)
        Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        return
    monkeypatch.setattr(models, "TEXT", TEXT)
    monkeypatch.setattr(models, "EXPERTS", models.EXPERTS | EXPERTS)
    monkeypatch.setattr(models, "VISION", models.VISION | {"out_hidden_size": 192})
    monkeypatch.setattr(models, "_AUDIO", models._AUDIO | {"output_dim": 192})
    tokens, model, save = models.make_media_model(kind, 0)
    save(folder, model.to(torch.bfloat16), tokens)


@pytest.mark.sglang
@pytest.mark.parametrize("kind", ["dense", "experts", "vl", "vl-moe", "omni"])
def test_every_tensor_has_a_place_of_its_type_and_loading_is_nothing_but_copying(
    kind, tmp_path, monkeypatch
):
    save(kind, tmp_path, monkeypatch)
    script = Path(__file__).with_name("fp8_loader.py")
    answer = subprocess.run(
        [os.environ["RELAX_SGLANG_PYTHON"], script, tmp_path], capture_output=True, text=True,
        timeout=120, env=os.environ | launch.environment("cpu", tmp_path, is_quantized=True),
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-2000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert (found["wrong"], found["uncovered"]) == ([], [])
    assert found["compiles_first"] is False
    types = {name: dtype.removeprefix("torch.") for name, dtype in found["types"].items()}
    kept = {name for name, dtype in types.items() if dtype == "bfloat16"}
    towers = {name for name in types if any(tower in name for tower in TOWERS)}
    assert towers <= kept
    assert bool(towers) == (kind in ("vl", "vl-moe", "omni"))
    linear = ("_proj.weight", "w13_weight", "w2_weight")
    assert {name for name in kept - towers if name.endswith(linear)} == {
        name for name in set(types) - towers if ".layers.1." in name and name.endswith(linear)
    }
    for name in set(types) - kept:
        assert types[name] == ("float32" if name.endswith("_scale_inv") else "float8_e4m3fn")
    assert sum(dtype == "float8_e4m3fn" for dtype in types.values()) == 4
