"""The tiny model that sees and hears, and its tasks."""

import json

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file
from test_tiny_vl import colour_in
from transformers import (
    AutoTokenizer,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from relax_hpc.demo import hearing, make_tiny_vl, shapes, tones
from relax_hpc.demo.warm_start import Sound, _loss
from relax_hpc.errors import ConfigError
from relax_hpc.models import fields, qwen3_omni_moe, qwen3_vl, registry
from relax_hpc.models.config_json import ConfigJson
from relax_hpc.prompts import tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("NUM_TRAIN", 16), ("NUM_HELDOUT", 8), ("_STEPS", 2)):
            patch.setattr(make_tiny_vl, name, value)
        report = make_tiny_vl.make(folder, kind="omni", seed=3, progress=print)
        again = make_tiny_vl.make(folder, kind="omni", seed=3, progress=pytest.fail)
    assert report == again == json.loads((folder / "made.json").read_text())
    return folder


def test_transformers_loads_the_very_weights_and_towers_and_talker_do_not_learn(made):
    kind = Qwen3OmniMoeForConditionalGeneration
    expected = hearing.model(hearing.tokenizer(), seed=3).state_dict()
    untrained = kind.from_pretrained(made / "untrained").state_dict()
    assert untrained.keys() == expected.keys()
    assert all(torch.equal(untrained[name], expected[name]) for name in expected)
    trained = kind.from_pretrained(made / "model").state_dict()
    same = {name for name in expected if torch.equal(trained[name], expected[name])}
    still = (".visual.", ".audio_tower.")
    assert same == {
        name for name in expected
        if any(part in name for part in still) or not name.startswith("thinker.")
    }  # fmt: skip


def test_the_folder_is_one_of_the_hubs(made):
    """Each expert's matrices by themselves, not square, and no tensor but those that are known."""
    tensors = load_file(made / "model" / "model.safetensors")
    shape = qwen3_omni_moe.read(ConfigJson(made / "model"))
    assert (shape.num_layers, shape.vision.levels, shape.audio.chunks) == (6, 4, 2)
    known = {}
    for parameter in qwen3_omni_moe.parameters(shape):
        shapes_of = list(parameter.hf.values()) * (parameter.num_experts or 1)
        known |= dict(zip(parameter.names(), shapes_of, strict=True))
    kept = qwen3_omni_moe.FAMILY.kept
    assert known == {
        name: tuple(each.shape) for name, each in tensors.items() if not name.startswith(kept)
    }
    assert known["thinker.model.layers.5.mlp.experts.3.gate_proj.weight"] == (48, 64)
    assert {name.split(".")[0] for name in tensors} == {"thinker", "talker", "code2wav"}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["tie_word_embeddings"], True, "thinker_config.tie_word_embeddings = True: only false"),
        (["audio_config", "output_dim"], 48, "output_dim = 48: text_config.hidden_size = 64"),
        (["audio_config", "encoder_attention_heads"], 5, "heads = 5: a divisor of d_model = 48"),
        (["audio_config", "n_window_infer"], 250, "n_window_infer = 250: a multiple of"),
        (["audio_config", "encoder_layers"], None, "encoder_layers = None: a positive integer"),
        (["text_config", "num_experts_per_tok"], 5, "num_experts_per_tok = 5: there are"),
    ],
)
def test_a_field_that_would_be_computed_otherwise_is_refused_by_name(
    made, tmp_path, path, value, message
):
    record = json.loads((made / "model" / "config.json").read_text())
    *tables, key = ["thinker_config", *path]
    table = record
    for name in tables:
        table = table[name]
    table[key] = value
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        qwen3_omni_moe.read(ConfigJson(tmp_path))
    assert message in str(refused.value)


def test_a_rotary_base_that_is_left_out_is_that_of_transformers(made, tmp_path):
    from transformers import Qwen3OmniMoeThinkerConfig, Qwen3VLConfig

    assert Qwen3VLConfig().text_config.rope_parameters["rope_theta"] == qwen3_vl.ROPE_BASE
    record = json.loads((made / "model" / "config.json").read_text())
    text = record["thinker_config"]["text_config"]
    del text["rope_parameters"]["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(record))
    expected = Qwen3OmniMoeThinkerConfig(text_config=text).text_config.rope_parameters
    found = qwen3_omni_moe.read(ConfigJson(tmp_path)).rope
    assert found.base == expected["rope_theta"] != 1e4


OF_EVERY_PART = {
    "add_cross_attention": False, "cross_attention_hidden_size": None, "dtype": None,
    "decoder_start_token_id": None, "finetuning_task": None, "is_decoder": False, "prefix": None,
    "pruned_heads": {}, "sep_token_id": None, "task_specific_params": None, "torchscript": False,
    "tf_legacy_loss": False, "tie_encoder_decoder": False, "use_bfloat16": False,
    "tokenizer_class": None, "output_attentions": False, "bos_token_id": None,
}  # fmt: skip
PUBLISHED = {
    "text_config": {
        "use_qk_norm": True, "shared_expert_intermediate_size": 0, "tie_word_embeddings": False,
        "rope_parameters": {
            "interleaved": True, "mrope_interleaved": True, "mrope_section": [6, 5, 5],
            "rope_theta": 1000000, "rope_type": "default", "type": "default",
        },
    },
    "vision_config": {
        "apply_vit_abs_pos_embed": True, "image_size": 768, "in_chans": 3, "tokens_per_second": 2,
        "spatial_patch_size": 16, "tie_word_embeddings": True,
    },
    "audio_config": {"tie_word_embeddings": True, "max_source_positions": 1500},
}  # fmt: skip
"""Fields of the published Qwen3-Omni-30B-A3B that a folder of transformers 5 has otherwise."""


def test_the_fields_of_the_published_model_leave_no_doubt(made, tmp_path):
    record = json.loads((made / "model" / "config.json").read_text())
    thinker = record["thinker_config"]
    for part, said in PUBLISHED.items():
        thinker[part] |= OF_EVERY_PART | said
    thinker |= {"audio_end_token_id": 5, "seconds_per_chunk": 2, "user_token_id": 872}
    record |= {"tts_bos_token_id": 6, "tts_eos_token_id": 7, "tts_pad_token_id": 8}
    (tmp_path / "config.json").write_text(json.dumps(record))
    shape = registry.read_architecture(tmp_path)
    assert (shape.rope.base, shape.rope.sections) == (1e6, (6, 5, 5))
    assert fields.doubts(ConfigJson(tmp_path)) == []
    for key, value in (("use_qk_norm", False), ("shared_expert_intermediate_size", 64)):
        kept, thinker["text_config"][key] = thinker["text_config"][key], value
        (tmp_path / "config.json").write_text(json.dumps(record))
        with pytest.raises(ConfigError, match=f"text_config.{key} = {value}: only"):
            registry.read_architecture(tmp_path)
        thinker["text_config"][key] = kept


def test_only_the_medium_tells_the_answer(made):
    for file, count in (("train", 16), ("heldout", 8)):
        rows = [json.loads(line) for line in (made / f"{file}.jsonl").read_text().splitlines()]
        heard = [row for row in rows if "audios" in row]
        answers = [row["answer"] for row in rows]
        for names in (tones.PITCHES, shapes.COLOURS):
            assert {name: answers.count(name) for name in names} == dict.fromkeys(names, count // 8)
        assert len({json.dumps(row["prompt"]) for row in heard}) == 1
        assert [row["answer"] for row in heard] == [
            pitch_in(made / row["audios"][0]) for row in heard
        ]


def pitch_in(path):
    """The pitch that is nearest to the loudest frequency of a sound."""
    wave, rate = soundfile.read(path)
    loudest = np.abs(np.fft.rfft(wave)).argmax() * rate / len(wave)
    apart = {name: abs(np.log(loudest / hertz)) for name, hertz in tones.PITCHES.items()}
    assert min(apart.values()) < 0.11
    return min(apart, key=apart.get)


def test_colours_of_the_images_are_the_answers(made):
    from PIL import Image

    rows = [json.loads(line) for line in (made / "train.jsonl").read_text().splitlines()]
    seen = [row for row in rows if "images" in row]
    assert [row["answer"] for row in seen] == [
        colour_in(Image.open(made / row["images"][0])) for row in seen
    ]


def test_the_loss_is_of_what_sounds_and_images_show(made):
    model = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(made / "model")
    tokens = AutoTokenizer.from_pretrained(made / "model")
    examples = make_tiny_vl._examples(made, "train.jsonl", tokens, 6)
    kinds = {isinstance(example.medium, Sound) for example in examples}
    assert kinds == {True, False}
    several = _loss(model, examples).item()
    each = [_loss(model, [example]).item() for example in examples]
    assert several == pytest.approx(sum(each) / 6, rel=1e-3), "responses are of one length"
    quiet = [
        example._replace(medium=example.medium._replace(mel=example.medium.mel * 0))
        for example in examples if isinstance(example.medium, Sound)
    ]  # fmt: skip
    heard = [example for example in examples if isinstance(example.medium, Sound)]
    assert abs(_loss(model, quiet).item() - _loss(model, heard).item()) > 1e-3


def test_a_chat_template_of_the_processor_is_taken_where_the_tokenizer_has_none(made, tmp_path):
    """As the folder of the hub has it."""
    for path in (made / "model").iterdir():
        if path.suffix in (".json", ".jinja") and "preprocessor" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    text = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    assert tokenizer.load(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    assert tokenizer.load(tmp_path).chat_template == text
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": [text]}))
    with pytest.raises(ConfigError, match=r"chat_template\.json: has no text chat_template"):
        tokenizer.load(tmp_path)
