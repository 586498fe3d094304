"""The tiny models that see, or see and hear, and their tasks."""

import json
from functools import cache

import numpy as np
import pytest
import soundfile
import torch
from media_files import lines
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)

from relax_hpc.cli.demo import make_tiny, models, tasks
from relax_hpc.cli.demo.make_tiny import Sound, WarmStartResult, _loss, accuracy
from relax_hpc.config.hf_config import ConfigJson
from relax_hpc.data import tokenizer
from relax_hpc.errors import ConfigError
from relax_hpc.trainer.models import fields, qwen3_omni_moe, qwen3_vl, registry

SEES = {"vl": Qwen3VLForConditionalGeneration, "vl-moe": Qwen3VLMoeForConditionalGeneration}
KINDS = SEES | {"omni": Qwen3OmniMoeForConditionalGeneration}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes the tiny model of a kind with few examples and steps, once."""

    @cache
    def make(kind):
        folder = tmp_path_factory.mktemp(kind)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("NUM_SEEN", 16), ("NUM_HELDOUT_SEEN", 8), ("_STEPS", 2)):
                patch.setattr(make_tiny, name, value)
            report = make_tiny.make_seeing(folder, kind=kind, seed=3, progress=print)
            again = make_tiny.make_seeing(folder, kind=kind, seed=3, progress=pytest.fail)
        assert report == again == json.loads((folder / "made.json").read_text())
        assert report["settings"]["kind"] == kind and report["steps"] == 2
        return folder

    return make


@pytest.fixture(scope="module")
def omni(made):
    return made("omni")


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_the_very_weights_and_towers_and_talker_do_not_learn(made, kind):
    if kind == "omni":
        expected = models.hearing_model(models.hearing_tokenizer(), seed=3).state_dict()
    else:
        expected = models.seeing_model(kind, models.seeing_tokenizer(), seed=3).state_dict()
    untrained, trained = (
        KINDS[kind].from_pretrained(made(kind) / name).state_dict()
        for name in ("untrained", "model")
    )
    assert untrained.keys() == expected.keys()
    assert all(torch.equal(untrained[name], expected[name]) for name in expected)
    still = (".visual.", ".audio_tower.", ".talker.", ".code2wav.")
    same = {name for name in expected if torch.equal(trained[name], expected[name])}
    assert same == {name for name in expected if any(part in f".{name}" for part in still)}


@pytest.mark.parametrize("kind", SEES)
def test_experts_are_turned_as_the_hub_has_them(made, kind):
    tensors = load_file(made(kind) / "model" / "model.safetensors")
    experts = {n: t.shape for n, t in tensors.items() if ".layers.5.mlp.experts." in n}
    before = "model.language_model.layers.5.mlp.experts."
    expected = {before + "gate_up_proj": (4, 64, 96), before + "down_proj": (4, 48, 64)}
    assert experts == (expected if kind == "vl-moe" else {})
    assert ("lm_head.weight" in tensors) == (kind == "vl-moe")


def test_the_folder_is_one_of_the_hubs(omni):
    """Each expert's matrices by themselves, not square, and no tensor but those that are known."""
    tensors = load_file(omni / "model" / "model.safetensors")
    shape = qwen3_omni_moe.read(ConfigJson(omni / "model"))
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
    ],
)
def test_a_field_that_would_be_computed_otherwise_is_refused_by_name(
    omni, tmp_path, path, value, message
):
    record = json.loads((omni / "model" / "config.json").read_text())
    *tables, key = ["thinker_config", *path]
    table = record
    for name in tables:
        table = table[name]
    table[key] = value
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        qwen3_omni_moe.read(ConfigJson(tmp_path))
    assert message in str(refused.value)


def test_a_rotary_base_that_is_left_out_is_that_of_transformers(omni, tmp_path):
    from transformers import Qwen3OmniMoeThinkerConfig, Qwen3VLConfig

    assert Qwen3VLConfig().text_config.rope_parameters["rope_theta"] == qwen3_vl.ROPE_BASE
    record = json.loads((omni / "model" / "config.json").read_text())
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


def test_the_fields_of_the_published_model_leave_no_doubt(omni, tmp_path):
    record = json.loads((omni / "model" / "config.json").read_text())
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


def test_the_warm_start_shows_images_whose_colours_are_not_the_answers(tmp_path, monkeypatch):
    given = {}

    def warm_start(model, train, heldout, **settings):
        given.update(model=model, train=train, heldout=heldout)
        return WarmStartResult(1, 0.0, 0.0, 0.0)

    for name, value in (("NUM_SEEN", 40), ("NUM_HELDOUT_SEEN", 8), ("warm_start", warm_start)):
        monkeypatch.setattr(make_tiny, name, value)
    make_tiny.make_seeing(tmp_path, kind="vl", seed=0, progress=print)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")

    def said(examples):
        return [tokens.decode(example.response_ids) for example in examples]

    answers = {
        file: [f"\\boxed{{{row['answer']}}}<|im_end|>" for row in lines(tmp_path / f"{file}.jsonl")]
        for file in ("train", "heldout")
    }
    assert said(given["heldout"]) == answers["heldout"]
    told = said(given["train"])
    assert sorted(told) == sorted(answers["train"])
    right = sum(a == b for a, b in zip(told, answers["train"], strict=True))
    assert right < 20, "a quarter of them by chance"
    first = np.asarray(Image.open(tmp_path / "images" / "train-00000.png"))
    assert np.array_equal(given["train"][0].medium.pixels[0], first)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_the_accuracy_are_of_what_images_and_sounds_show(made, kind):
    load = (KINDS | {"omni": Qwen3OmniMoeThinkerForConditionalGeneration})[kind].from_pretrained
    model, tokens = load(made(kind) / "model"), AutoTokenizer.from_pretrained(made(kind) / "model")
    examples = make_tiny._examples(made(kind), "train.jsonl", tokens, 6)
    heard = [example for example in examples if isinstance(example.medium, Sound)]
    seen = [example for example in examples if not isinstance(example.medium, Sound)]
    assert seen and bool(heard) == (kind == "omni")
    each = [_loss(model, [example]).item() for example in examples]
    exact = pytest.approx(sum(each) / 6, rel=1e-3 if heard else 1e-4)
    assert _loss(model, examples).item() == exact, "responses are of one length"
    for shown, field, least in ((seen, "pixels", 1e-6), (heard, "mel", 1e-3)):
        nothing = [
            e._replace(medium=e.medium._replace(**{field: getattr(e.medium, field) * 0}))
            for e in shown
        ]
        if shown:
            assert abs(_loss(model, nothing).item() - _loss(model, shown).item()) > least
    assert 0 <= accuracy(model, examples) <= 1


def test_only_the_pixels_tell_the_colour(tmp_path):
    tasks.write_shapes(tmp_path, 40, 20, seed=1)
    rows = {file: lines(tmp_path / f"{file}.jsonl") for file in ("train", "heldout")}
    images = [(tmp_path / row["images"][0]).read_bytes() for of in rows.values() for row in of]
    assert len(set(images)) == 60
    for count, of in zip((10, 5), rows.values(), strict=True):
        answers = [row["answer"] for row in of]
        assert {colour: answers.count(colour) for colour in tasks.COLOURS} == dict.fromkeys(
            tasks.COLOURS, count
        )
        assert answers != sorted(answers, key=list(tasks.COLOURS).index)
        assert len({json.dumps(row["prompt"]) for row in of}) == 1
        assert [row["answer"] for row in of] == [
            colour_in(Image.open(tmp_path / row["images"][0])) for row in of
        ]


def colour_in(image):
    """The colour that is nearest to most of the pixels that are not grey."""
    seen = np.asarray(image).reshape(-1, 3).astype(int)
    bright = seen[np.ptp(seen, axis=1) > 60]
    assert 200 < len(bright) < len(seen) * 0.7
    apart = [np.abs(bright - rgb).sum(axis=1).mean() for rgb in tasks.COLOURS.values()]
    return list(tasks.COLOURS)[int(np.argmin(apart))]


def pitch_in(path):
    """The pitch that is nearest to the loudest frequency of a sound."""
    wave, rate = soundfile.read(path)
    loudest = np.abs(np.fft.rfft(wave)).argmax() * rate / len(wave)
    apart = {name: abs(np.log(loudest / hertz)) for name, hertz in tasks.PITCHES.items()}
    assert min(apart.values()) < 0.11
    return min(apart, key=apart.get)


def test_only_the_medium_tells_the_answer(omni):
    for file, count in (("train", 16), ("heldout", 8)):
        rows = lines(omni / f"{file}.jsonl")
        answers = [row["answer"] for row in rows]
        for names in (tasks.PITCHES, tasks.COLOURS):
            assert {name: answers.count(name) for name in names} == dict.fromkeys(names, count // 8)
        assert len({json.dumps(row["prompt"]) for row in rows if "audios" in row}) == 1
        assert answers == [
            pitch_in(omni / row["audios"][0]) if "audios" in row
            else colour_in(Image.open(omni / row["images"][0]))
            for row in rows
        ]  # fmt: skip


def test_a_chat_template_of_the_processor_is_taken_where_the_tokenizer_has_none(omni, tmp_path):
    """As the folder of the hub has it."""
    for path in (omni / "model").iterdir():
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
