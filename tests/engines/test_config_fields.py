"""Every field of config.json: obeyed as transformers does, refused by name, or without effect."""

import dataclasses
import json
import logging
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SAVED, YARN, by_transformers, check, distance, linked, make, write
from trainers import VOCAB, job

from relax_hpc.cli import main as cli
from relax_hpc.config.engines import EnginePool
from relax_hpc.errors import ConfigError, EngineError
from relax_hpc.inference.embedded.model import Decoder, ModelShape
from relax_hpc.roles.engine.check import check_engine
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.training import check as training_check
from relax_hpc.trainer.checkpoints import convert as conversion
from relax_hpc.trainer.models.fields import (
    AUDIO_FIELDS,
    FIELDS,
    OMNI_FIELDS,
    THINKER_FIELDS,
    VISION_FIELDS,
    WHOLE_FIELDS,
    Inert,
    Obeyed,
    Only,
)
from relax_hpc.trainer.models.registry import FAMILIES, read_architecture


def test_every_field_of_the_installed_transformers_has_an_entry():
    """A field that a new transformers has fails here until somebody has said what becomes of it."""
    from transformers import (
        GenerationConfig,
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    for kind in (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig):
        assert kind.model_type in FAMILIES
        theirs = {field.name for field in dataclasses.fields(kind)}
        theirs |= set(kind().to_dict()) | set(kind.attribute_map) | set(kind.attribute_map.values())
        theirs |= set(GenerationConfig._get_default_generation_params())
        assert theirs <= set(FIELDS), sorted(theirs - set(FIELDS))


@pytest.mark.parametrize("kind", ["sees", "hears"])
def test_every_field_of_a_model_of_several_parts_has_an_entry(kind):
    from transformers import GenerationConfig, Qwen3OmniMoeConfig, Qwen3VLConfig

    if kind == "sees":
        made = whole = Qwen3VLConfig()
        parts = [(made, WHOLE_FIELDS)]
    else:
        made, whole = Qwen3OmniMoeConfig(), Qwen3OmniMoeConfig().thinker_config
        parts = [(made, OMNI_FIELDS), (whole, THINKER_FIELDS), (whole.audio_config, AUDIO_FIELDS)]
    assert made.model_type in FAMILIES
    parts += [(whole.text_config, FIELDS), (whole.vision_config, VISION_FIELDS)]
    for part, known in parts:
        theirs = {field.name for field in dataclasses.fields(type(part))} | set(part.to_dict())
        theirs |= set(part.attribute_map) | set(part.attribute_map.values())
        theirs |= set(GenerationConfig._get_default_generation_params())
        assert theirs <= set(known), sorted(theirs - set(known))


def test_a_family_is_known_everywhere_by_its_line_in_the_registry(tmp_path, monkeypatch):
    """G4: nothing else lists the families, so a new one may name its class in config.json."""
    mine = dataclasses.replace(FAMILIES["llama"], model_type="mine", causal="MineForCausalLM")
    monkeypatch.setitem(FAMILIES, "mine", mine)
    said = {
        "model_type": "mine", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    }  # fmt: skip

    def shape(*classes):
        record = said | ({"architectures": list(classes)} if classes else {})
        (tmp_path / "config.json").write_text(json.dumps(record))
        return read_architecture(tmp_path)

    assert shape("MineForCausalLM").num_layers == 2
    with pytest.raises(ConfigError, match=r"only None or \['MineForCausalLM'\] is supported"):
        shape("LlamaForCausalLM")
    with pytest.raises(ConfigError, match=r'add "architectures": \["MineForCausalLM"\]'):
        check_engine(EnginePool(kind="sglang"), shape())


def test_the_page_about_models_names_every_field_that_matters():
    page = (Path(__file__).parents[2] / "docs/reference/models.md").read_text()
    obeyed, only = (page.split(f"| {head} | |")[1].split("\n\n")[0] for head in ("obeyed", "only"))
    for text, kind in ((obeyed, Obeyed), (only, Only)):
        named = {name for name in re.findall(r"`(\w+)`", text) if name != "ForCausalLM"}
        assert named == {name for name, field in FIELDS.items() if isinstance(field, kind)}


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
    elsewhere = {"model_type", "eos_token_id", "max_position_embeddings", "sliding_window"}
    obeyed = {name for name, field in FIELDS.items() if isinstance(field, Obeyed)}
    assert obeyed == (shown - {"one expert"}) | of_rotation | elsewhere


def test_token_ids_that_end_a_response_and_the_longest_text_are_the_files(tmp_path):
    write(tmp_path, "qwen3", eos_token_id=[3, 5], max_position_embeddings=99)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    shape = ModelShape.read(tmp_path)
    assert shape.eos_ids == {3, 5, 7}
    assert shape.max_positions == read_architecture(tmp_path).max_positions == 99


REFUSED = {
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "pretraining_tp": 2,
    "rope_interleaved": True,
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
    for read in (read_architecture, ModelShape.read):
        with pytest.raises(ConfigError) as refused:
            read(tmp_path)
        said = str(refused.value)
        assert said.startswith(f"{tmp_path / 'config.json'}: {name} = {REFUSED[name]!r}: only ")
        assert " is supported: " in said and "\n" not in said


def test_a_model_that_is_refused_is_refused_by_convert_and_leaves_nothing(
    tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, "qwen3", is_causal=False)
    out = tmp_path / "out"
    monkeypatch.setattr(
        sys, "argv", ["relax-hpc", "convert", str(folder), "--to", "megatron", "--out", str(out)]
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert (
        f"{folder / 'config.json'}: is_causal = False: only None or True" in capsys.readouterr()[1]
    )
    assert not out.exists()


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
    others = {name for name in ODD if not isinstance(FIELDS[name], Inert)}
    assert others == {"sliding_window"}  # which only Mistral's layers have
    folder = linked(tmp_path, weights["qwen3_moe"], "qwen3_moe", **ODD)
    expected = by_transformers(folder)
    assert distance(expected, by_transformers(weights["qwen3_moe"])) < 1e-6
    check(ranks, folder, expected, engine=False)


def test_an_unknown_field_and_a_base_that_is_lost_are_named_by_the_check(tmp_path, caplog):
    parameters = {"rope_type": "default", "rope_theta": 1e6}
    write(tmp_path, "qwen3", rope_theta=None, rope_parameters=parameters)
    training_check.check_model(tmp_path, job(tmp_path).actor)
    assert caplog.messages == []
    write(
        tmp_path, "qwen3", rope_theta=None, rope_parameters=parameters, rope_scaling=YARN,
        new_gate=True, mup=0.5,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        training_check.check_model(tmp_path, job(tmp_path).actor)
    unknown, lost = caplog.messages
    assert unknown.startswith(f"{tmp_path / 'config.json'}: mup, new_gate: unknown fields, are")
    assert "rope_parameters.rope_theta = 1000000.0: is passed over" in lost


def another_output(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def another_model_in_an_index(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({name: -weight for name, weight in tensors.items()}, folder / "1.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def by_the_index(folder):
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "other_reading", "message"),
    [
        (another_output, lambda folder: None, "there is an lm_head.weight other than"),
        (
            another_model_in_an_index,
            by_the_index,
            "has model.safetensors beside model.safetensors.",
        ),
    ],
)
def test_a_folder_that_transformers_and_engines_read_differently_is_refused_everywhere(
    ranks, tmp_path, change, other_reading, message
):
    folder = make(tmp_path, "qwen3", tie_word_embeddings=True)
    before = by_transformers(folder)
    change(folder)
    engine = Decoder(ModelShape.read(folder), torch.float32, torch.device("cpu"))
    for read in (
        lambda: Facts(folder).check_weights(folder),
        lambda: conversion.to_megatron(folder, tmp_path / "out"),
        lambda: engine.load_folder(folder),
        lambda: ranks[1].open_trainer(config=job(folder)),
    ):
        with pytest.raises((ConfigError, EngineError, AssertionError), match=message):
            read()
    other_reading(folder)
    assert distance(before, by_transformers(folder)) > 1  # it would have mattered


def test_an_output_matrix_that_repeats_the_embedding_is_the_embedding(ranks, tmp_path):
    folder = make(tmp_path, "qwen3", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    check(ranks, folder, by_transformers(folder), engine=True)


def test_what_is_exported_keeps_the_rotary_positions(weights, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    linked(folder, weights["qwen3"], "qwen3", rope_parameters=SAVED, rope_scaling=YARN)
    conversion.to_megatron(folder, tmp_path / "core")
    conversion.to_hf(tmp_path / "core", folder, tmp_path / "back")
    config, exported = ((f / "config.json").read_text() for f in (folder, tmp_path / "back"))
    assert json.loads(exported) == json.loads(config)
    expected = by_transformers(folder)
    assert distance(expected, by_transformers(weights["qwen3"])) > 0.01
    assert distance(expected, by_transformers(tmp_path / "back")) == 0
