"""Every field of config.json: obeyed as transformers does, refused by name, or without effect."""

import dataclasses
import json
import logging

import megatron_worker as worker
import numpy as np
import pytest
import torch
from megatron_reference import collect, hf_logprobs
from megatron_worker import VOCAB, job, trajectories

from relax_hpc.engines.embedded.model import KvCache, Qwen3, Shape
from relax_hpc.engines.hf import fields
from relax_hpc.engines.hf.config_json import ConfigJson
from relax_hpc.engines.hf.fields import FIELDS, Inert, Obeyed, Only
from relax_hpc.engines.hf.rope import Rope
from relax_hpc.engines.megatron.architectures.registry import read_architecture
from relax_hpc.errors import ConfigError
from relax_hpc.launch import preflight

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
FAMILIES = {
    "qwen3": BASE | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen2": BASE | {"model_type": "qwen2"},
    "qwen3_moe": BASE | EXPERTS,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SAVED = {"rope_type": "default", "rope_theta": 20000.0}  # as transformers 5 saves it

ROPES = {
    "a base": {"rope_theta": 1e6},
    "a base as transformers 5 has it": {"rope_parameters": {"rope_theta": 1e6}},
    "yarn": {"rope_scaling": YARN},
    "yarn by its old name": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn beside parameters": {"rope_parameters": SAVED, "rope_scaling": YARN},
    "yarn with a base": {"rope_theta": None, "rope_parameters": YARN | {"rope_theta": 3e4}},
    "yarn, two bases": {"rope_scaling": YARN | {"rope_theta": 3e4}},
    "yarn, longer": {"rope_scaling": YARN | {"attention_factor": 1.3}},
    "yarn, other bounds": {"rope_scaling": YARN | {"beta_fast": 4, "beta_slow": 2.5}},
    "yarn, bounds of no whole channels": {"rope_scaling": YARN | {"truncate": False}},
    "yarn, lengths by scales": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.5}},
    "yarn, one scale": {"rope_scaling": YARN | {"mscale": 0.7}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3}},
    "linear beside parameters": {
        "rope_parameters": SAVED, "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
    "nothing": {"rope_theta": None},
}  # fmt: skip
"""What of it is None, is not there."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder of each family; models of other fields have the same weights."""
    return {name: make(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


def make(folder, family, **changes):
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
    model.save_pretrained(folder)
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
    """Of every token, one by one, with the cache."""
    model = Qwen3(Shape.read(folder), torch.float32, torch.device("cpu"))
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
    ranks[1].call(worker.open_trainer, config=job(folder, budget=64))
    for mine, theirs in zip(
        collect(ranks[1].call(worker.logprobs, rows=ROWS)), expected, strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    if engine:
        for mine, theirs in zip(by_engine(folder), expected, strict=True):
            np.testing.assert_allclose(mine, theirs[-len(mine) :], atol=1e-5)


def distance(found, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(found, other, strict=True))


@pytest.mark.parametrize("case", ROPES)
def test_rotary_positions_are_those_of_transformers_on_engine_and_trainer(
    ranks, weights, tmp_path, case
):
    folder = linked(tmp_path, weights["qwen3"], "qwen3", **ROPES[case])
    expected = by_transformers(folder)
    assert distance(expected, by_transformers(weights["qwen3"])) > 0.01
    check(ranks, folder, expected, engine=True)


def test_other_families_have_yarn_too(ranks, weights, tmp_path):
    for family in ("qwen2", "qwen3_moe"):  # attention by Megatron's own steps; experts
        folder = tmp_path / family
        folder.mkdir()
        linked(folder, weights[family], family, rope_scaling=YARN)
        expected = by_transformers(folder)
        assert distance(expected, by_transformers(weights[family])) > 0.01
        check(ranks, folder, expected, engine=False)


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
    "dynamic": ({"type": "dynamic", "factor": 2.0}, "type = 'dynamic': only default, linear, yarn"),
    "llama3": ({"rope_type": "llama3"}, "rope_type = 'llama3': only default, linear, yarn is"),
    "longrope": ({"rope_type": "longrope"}, "rope_type = 'longrope': only"),
    "no type": ({"rope_type": None, "factor": 2.0}, "rope_type = None: only"),
    "by layer": ({"full_attention": {"rope_type": "yarn"}}, "full_attention = {'rope_type': 'yar"),
    "a foreign key": (YARN | {"attn_factor": 2}, "attn_factor = 2: rope type 'yarn' has no such"),
    "no factor": ({"type": "yarn"}, "factor = missing: a positive number is expected"),
    "text": (YARN | {"factor": "4"}, "factor = '4': a positive number is expected"),
    "nan": (YARN | {"factor": float("nan")}, "factor = nan: a positive number is expected"),
    "half a head": (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: only 1.0"),
    "base 1": (YARN | {"rope_theta": 1.0}, "rope_theta = 1.0: rope type 'yarn' takes a number lar"),
    "no object": ([4.0], "rope_scaling = [4.0]: an object is expected"),
}


@pytest.mark.parametrize("case", WRONG_ROPES)
def test_rotary_positions_that_are_not_computed_are_refused_by_name(tmp_path, case):
    value, message = WRONG_ROPES[case]
    write(tmp_path, "qwen3", rope_scaling=value)
    for read in (read_architecture, Shape.read):
        with pytest.raises(ConfigError) as refused:
            read(tmp_path)
        assert str(refused.value).startswith(f"{tmp_path / 'config.json'}: rope_scaling")
        assert message in str(refused.value) and "\n" not in str(refused.value)


def test_every_field_of_the_installed_transformers_has_an_entry():
    """A field that a new transformers has fails here until somebody has said what becomes of it."""
    from transformers import GenerationConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    for kind in (Qwen2Config, Qwen3Config, Qwen3MoeConfig):
        assert kind.model_type in fields.CAUSAL
        theirs = {field.name for field in dataclasses.fields(kind)}
        theirs |= set(kind().to_dict()) | set(kind.attribute_map) | set(kind.attribute_map.values())
        theirs |= set(GenerationConfig._get_default_generation_params())
        assert theirs <= set(FIELDS), sorted(theirs - set(FIELDS))


SAME_WEIGHTS = {
    "rms_norm_eps": ("qwen3", {"rms_norm_eps": 0.05}),
    "num_experts_per_tok": ("qwen3_moe", {"num_experts_per_tok": 3}),
    "norm_topk_prob": ("qwen3_moe", {"norm_topk_prob": True}),
    "one expert, of weight 1": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
}
OTHER_WEIGHTS = {
    "vocab_size": ("qwen3", {"vocab_size": VOCAB + 8}),
    "hidden_size": ("qwen3", {"hidden_size": 40}),
    "intermediate_size": ("qwen3", {"intermediate_size": 56}),
    "num_hidden_layers": ("qwen3", {"num_hidden_layers": 2}),
    "num_attention_heads": ("qwen3", {"num_attention_heads": 6}),
    "num_key_value_heads": ("qwen3", {"num_key_value_heads": 1}),
    "head_dim": ("qwen3", {"head_dim": 24}),
    "head_dim, none said": ("qwen3", {"head_dim": None, "num_attention_heads": 2}),
    "head_dim, none said by Qwen2": ("qwen2", {"head_dim": None}),
    "tie_word_embeddings": ("qwen3", {"tie_word_embeddings": True}),
    "num_experts": ("qwen3_moe", {"num_experts": 3}),
    "num_local_experts": ("qwen3_moe", {"num_experts": None, "num_local_experts": 3}),
    "moe_intermediate_size": ("qwen3_moe", {"moe_intermediate_size": 16}),
    "mlp_only_layers": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "decoder_sparse_step": ("qwen3_moe", {"decoder_sparse_step": 2}),
}


@pytest.mark.parametrize("case", SAME_WEIGHTS)
def test_a_field_that_is_obeyed_matters_and_is_obeyed_as_by_transformers(
    ranks, weights, tmp_path, case
):
    family, changes = SAME_WEIGHTS[case]
    folder = linked(tmp_path, weights[family], family, **changes)
    expected = by_transformers(folder)
    assert distance(expected, by_transformers(weights[family])) > 0.001
    check(ranks, folder, expected, engine=family == "qwen3")


@pytest.mark.parametrize("case", OTHER_WEIGHTS)
def test_a_model_of_another_shape_is_computed_as_by_transformers(ranks, tmp_path, case):
    family, changes = OTHER_WEIGHTS[case]
    folder = make(tmp_path, family, **changes)
    other = tmp_path / "other"
    other.mkdir()
    assert read_architecture(folder) != read_architecture(write(other, family))
    check(ranks, folder, by_transformers(folder), engine=family == "qwen3")


def test_what_is_obeyed_is_tested():
    shown = {name.split(",")[0] for name in (*SAME_WEIGHTS, *OTHER_WEIGHTS)}
    of_rotation = {"rope_theta", "rope_scaling", "rope_parameters"}
    elsewhere = {"model_type", "eos_token_id", "max_position_embeddings"}
    obeyed = {name for name, field in FIELDS.items() if isinstance(field, Obeyed)}
    assert obeyed == (shown - {"one expert"}) | of_rotation | elsewhere


def test_token_ids_that_end_a_response_and_the_longest_text_are_the_files(tmp_path):
    write(tmp_path, "qwen3", eos_token_id=[3, 5], max_position_embeddings=99)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    shape = Shape.read(tmp_path)
    assert shape.eos_ids == {3, 5, 7}
    assert shape.max_positions == read_architecture(tmp_path).max_positions == 99


REFUSED = {
    "hidden_act": "gelu",
    "attention_bias": True,
    "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "attention_chunk_size": 16,
    "dual_chunk_attention_config": {"chunk_size": 16},
    "is_causal": False,
    "is_encoder_decoder": True,
    "per_layer_config": {"0": {"head_dim": 8}},
    "kv_sharing_modes": ["x"],
    "fusion_config": {"qkv": True},
    "quantization_config": {"quant_method": "fp8"},
    "configuration_files": ["config.5.0.0.json"],
    "transformers_weights": "other.safetensors",
    "architectures": ["Qwen2ForCausalLM"],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
    "use_mrope": True,
}


@pytest.mark.parametrize("name", [n for n, field in FIELDS.items() if isinstance(field, Only)])
def test_a_field_of_which_only_some_values_are_taken_is_refused_by_name_with_others(tmp_path, name):
    write(tmp_path, "qwen3", **{name: REFUSED[name]})
    for read in (read_architecture, Shape.read):
        with pytest.raises(ConfigError) as refused:
            read(tmp_path)
        said = str(refused.value)
        assert said.startswith(f"{tmp_path / 'config.json'}: {name} = {REFUSED[name]!r}: only ")
        assert " is supported: " in said and "\n" not in said


ODD = {
    "sliding_window": 7, "max_window_layers": 1, "bos_token_id": 3, "pad_token_id": 4,
    "dtype": "bfloat16", "torch_dtype": "float16", "attention_dropout": 0.3,
    "initializer_range": 3.0, "router_aux_loss_coef": 9.0, "output_router_logits": True,
    "use_cache": False, "chunk_size_feed_forward": 3, "gradient_checkpointing": True,
    "attn_implementation": "eager", "output_hidden_states": True, "id2label": {"0": "a"},
    "problem_type": "regression", "classifier_dropout": 0.5, "transformers_version": "4.0.0",
    "tokenizer_class": "X", "temperature": 0.1, "repetition_penalty": 9.0, "is_decoder": True,
    "auto_map": {"AutoConfig": "x.Y"},
}  # fmt: skip


def test_fields_without_effect_have_none_in_transformers_either(ranks, weights, tmp_path):
    assert all(isinstance(FIELDS[name], Inert) for name in ODD)
    folder = linked(tmp_path, weights["qwen3_moe"], "qwen3_moe", **ODD)
    expected = by_transformers(folder)
    assert distance(expected, by_transformers(weights["qwen3_moe"])) < 1e-6
    check(ranks, folder, expected, engine=False)


def test_an_unknown_field_and_a_base_that_is_lost_are_named_by_the_check(tmp_path, caplog):
    parameters = {"rope_type": "default", "rope_theta": 1e6}
    write(tmp_path, "qwen3", rope_theta=None, rope_parameters=parameters)
    preflight.check_model(tmp_path, job(tmp_path).actor)
    assert caplog.messages == []
    write(
        tmp_path, "qwen3", rope_theta=None, rope_parameters=parameters, rope_scaling=YARN,
        new_gate=True, mup=0.5,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        preflight.check_model(tmp_path, job(tmp_path).actor)
    unknown, lost = caplog.messages
    assert unknown.startswith(f"{tmp_path / 'config.json'}: mup, new_gate: unknown fields, are")
    assert "rope_parameters.rope_theta = 1000000.0: is passed over" in lost
