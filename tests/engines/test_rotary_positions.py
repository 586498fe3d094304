"""Rotary positions, plain and scaled: those of transformers, or refused by name."""

import pytest
import torch
from tiny_models import LLAMA3, SAVED, YARN, by_transformers, check, distance, linked, write

from relax_hpc.config.engines import EnginePool
from relax_hpc.config.hf_config import ConfigJson
from relax_hpc.errors import ConfigError
from relax_hpc.inference.embedded.model import ModelShape
from relax_hpc.roles.engine import check as engine_check
from relax_hpc.trainer.models.registry import read_architecture
from relax_hpc.trainer.models.rope import Rope

WIDE = YARN | {"beta_fast": 1, "beta_slow": 0.1}

ROPES = {
    "a base": {"rope_theta": 1e6},
    "a base as transformers 5 has it": {"rope_parameters": {"rope_theta": 1e6}},
    "yarn": {"rope_scaling": YARN},
    "yarn by its old name": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn beside parameters": {"rope_parameters": SAVED, "rope_scaling": YARN},
    "yarn with a base": {"rope_theta": None, "rope_parameters": YARN | {"rope_theta": 3e4}},
    "yarn, two bases": {"rope_scaling": YARN | {"rope_theta": 3e4}},
    "yarn, longer": {"rope_scaling": YARN | {"attention_factor": 1.3}},
    "yarn, other bounds": {"rope_scaling": WIDE},
    "yarn, bounds of no whole channels": {"rope_scaling": WIDE | {"truncate": False}},
    "yarn, lengths by scales": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.5}},
    "yarn, one scale": {"rope_scaling": YARN | {"mscale": 0.7}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3}},
    "linear beside parameters": {
        "rope_parameters": SAVED, "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
    "llama3": {"rope_scaling": LLAMA3},
    "llama3, other bounds": {"rope_scaling": LLAMA3 | {"low_freq_factor": 0.1}},
    "llama3 with a base": {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 3e4}},
    "nothing": {"rope_theta": None},
}  # fmt: skip
"""Settings of rotary positions; a key that is None is left out."""


@pytest.mark.parametrize("case", ROPES)
def test_rotary_positions_are_those_of_transformers_on_engine_and_trainer(
    ranks, weights, tmp_path, case
):
    folder = linked(tmp_path, weights["qwen3"], "qwen3", **ROPES[case])
    expected = by_transformers(folder)
    assert distance(expected, by_transformers(weights["qwen3"])) > 0.01
    check(ranks, folder, expected, engine=True)


@pytest.mark.parametrize("case", ROPES)
def test_angles_are_bitwise_those_of_transformers(tmp_path, case):
    from transformers import AutoConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    write(tmp_path, "qwen3", **ROPES[case])
    theirs = Qwen3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    mine = Rope.read(ConfigJson(tmp_path))
    assert torch.equal(mine.inverse_frequencies(16, torch.device("cpu")), theirs.inv_freq)
    assert mine.attention_factor == theirs.attention_scaling


WRONG_ROPES = {
    "dynamic": (
        {"type": "dynamic", "factor": 2.0},
        "type = 'dynamic': only default, linear, yarn,",
    ),
    "llama3, no bound": ({"rope_type": "llama3", "factor": 8}, "low_freq_factor = missing: a posi"),
    "llama3, no length": (
        LLAMA3 | {"original_max_position_embeddings": None},
        "_embeddings = None: a positive inte",
    ),
    "longrope": ({"rope_type": "longrope"}, "rope_type = 'longrope': only"),
    "by layer": ({"full_attention": {"rope_type": "yarn"}}, "full_attention = {'rope_type': 'yar"),
    "a foreign key": (YARN | {"attn_factor": 2}, "attn_factor = 2: rope type 'yarn' has no such"),
    "no factor": ({"type": "yarn"}, "factor = missing: a positive number is expected"),
    "text": (YARN | {"factor": "4"}, "factor = '4': a positive number is expected"),
    "nan": (YARN | {"factor": float("nan")}, "factor = nan: a positive number is expected"),
    "base 1": (YARN | {"rope_theta": 1.0}, "rope_theta = 1.0: rope type 'yarn' takes a number lar"),
    "no object": ([4.0], "rope_scaling = [4.0]: an object is expected"),
}


@pytest.mark.parametrize("case", WRONG_ROPES)
def test_rotary_positions_that_are_not_computed_are_refused_by_name(tmp_path, case):
    value, message = WRONG_ROPES[case]
    write(tmp_path, "qwen3", rope_scaling=value)
    for read in (read_architecture, ModelShape.read):
        with pytest.raises(ConfigError) as refused:
            read(tmp_path)
        assert str(refused.value).startswith(f"{tmp_path / 'config.json'}: rope_scaling")
        assert message in str(refused.value) and "\n" not in str(refused.value)


def test_what_sglang_would_pass_over_is_refused_for_it_alone(tmp_path):
    shape = read_architecture(write(tmp_path, "qwen3", **ROPES["yarn, longer"]))
    engine_check.check_engine(EnginePool(kind="embedded"), shape)
    with pytest.raises(ConfigError, match=r"rope_scaling: attention_factor = 1\.3: .* mscale"):
        engine_check.check_engine(EnginePool(kind="sglang"), shape)
    shape = read_architecture(write(tmp_path, "qwen3", **ROPES["linear"]))
    with pytest.raises(ConfigError, match=r"rope_scaling: factor = 3: .* write 3\.0"):
        engine_check.check_engine(EnginePool(kind="sglang"), shape)
    shape = read_architecture(write(tmp_path, "qwen3", **ROPES["linear beside parameters"]))
    engine_check.check_engine(EnginePool(kind="sglang"), shape)
    shape = read_architecture(write(tmp_path, "qwen3", **ROPES["yarn, lengths by scales"]))
    engine_check.check_engine(EnginePool(kind="sglang"), shape)
