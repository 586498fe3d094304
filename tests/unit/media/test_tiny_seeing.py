"""The tiny models that see, or see and hear, and their tasks."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from media_files import lines
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)

from relax_hpc.cli.demo import make_tiny, models, tasks
from relax_hpc.config.hf_config import ConfigJson
from relax_hpc.data import tokenizer
from relax_hpc.errors import ConfigError
from relax_hpc.trainer.models import fields, registry

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
    expected = models.make_media_model(kind, 3)[1].state_dict()
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
        thinker[part] |= said
    thinker |= {"audio_end_token_id": 5, "seconds_per_chunk": 2, "user_token_id": 872}
    record |= {"tts_bos_token_id": 6, "tts_eos_token_id": 7, "tts_pad_token_id": 8}
    (tmp_path / "config.json").write_text(json.dumps(record))
    shape = registry.read_architecture(tmp_path)
    assert (shape.rope.base, shape.rope.sections) == (1e6, (6, 5, 5))
    assert fields.doubts(ConfigJson(tmp_path)) == []
    thinker["text_config"]["use_qk_norm"] = False
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"use_qk_norm = False: only"):
        registry.read_architecture(tmp_path)


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
