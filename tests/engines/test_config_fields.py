"""Every field of config.json: obeyed as transformers does, refused by name, or without effect."""

import dataclasses
import json
import logging

import pytest
import transformers
from tiny_models import YARN, by_transformers, check, distance, linked, make, write
from trainers import job

from relax_hpc.errors import ConfigError
from relax_hpc.inference.embedded.model import ModelShape
from relax_hpc.roles.training import check as training_check
from relax_hpc.trainer.models.fields import (
    AUDIO_FIELDS,
    FIELDS,
    OMNI_FIELDS,
    THINKER_FIELDS,
    VISION_FIELDS,
    WHOLE_FIELDS,
    Inert,
)
from relax_hpc.trainer.models.registry import FAMILIES, read_architecture


def parts_of(kind):
    """The parts of a config of transformers, each with the fields that are known of it."""
    made = kind()
    if kind.model_type == "qwen3_vl":
        parts = [(made, WHOLE_FIELDS)]
    elif kind.model_type == "qwen3_omni_moe":
        whole, made = made, made.thinker_config
        parts = [(whole, OMNI_FIELDS), (made, THINKER_FIELDS), (made.audio_config, AUDIO_FIELDS)]
    else:
        return [(made, FIELDS)]
    return [*parts, (made.text_config, FIELDS), (made.vision_config, VISION_FIELDS)]


@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Qwen3VL", "Qwen3OmniMoe"]
)
def test_every_field_of_the_installed_transformers_has_an_entry(name):
    """A field that a new transformers has fails here until somebody has said what becomes of it."""
    kind = getattr(transformers, f"{name}Config")
    assert kind.model_type in FAMILIES
    for part, known in parts_of(kind):
        theirs = {field.name for field in dataclasses.fields(type(part))} | set(part.to_dict())
        theirs |= set(part.attribute_map) | set(part.attribute_map.values())
        theirs |= set(transformers.GenerationConfig._get_default_generation_params())
        assert theirs <= set(known), sorted(theirs - set(known))


SAME_WEIGHTS = {
    "rms_norm_eps": ("qwen3", {"rms_norm_eps": 0.05}),
    "num_experts_per_tok": ("qwen3_moe", {"num_experts_per_tok": 3}),
    "norm_topk_prob": ("qwen3_moe", {"norm_topk_prob": True}),
    "one expert, of weight 1": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
}
OTHER_WEIGHTS = {
    "hidden_size": ("qwen3", {"hidden_size": 40}),
    "intermediate_size": ("qwen3", {"intermediate_size": 56}),
    "num_hidden_layers": ("qwen3", {"num_hidden_layers": 2}),
    "num_key_value_heads": ("qwen3", {"num_key_value_heads": 1}),
    "head_dim": ("qwen3", {"head_dim": 24}),
    "head_dim, none said": ("qwen3", {"head_dim": None, "num_attention_heads": 2}),
    "tie_word_embeddings": ("qwen3", {"tie_word_embeddings": True}),
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


def test_token_ids_that_end_a_response_and_the_longest_text_are_the_files(tmp_path):
    write(tmp_path, "qwen3", eos_token_id=[3, 5], max_position_embeddings=99)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    shape = ModelShape.read(tmp_path)
    assert shape.eos_ids == {3, 5, 7}
    assert shape.max_positions == read_architecture(tmp_path).max_positions == 99


REFUSED = {
    "attention_bias": True,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "is_causal": False,
    "quantization_config": {"quant_method": "fp8"},
    "architectures": ["Qwen2ForCausalLM"],
    "original_max_position_embeddings": 16,
    "use_mrope": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_of_which_only_some_values_are_taken_is_refused_by_name_with_others(tmp_path, name):
    write(tmp_path, "qwen3", **{name: REFUSED[name]})
    for read in (read_architecture, ModelShape.read):
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
