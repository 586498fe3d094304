"""The tiny model that sees, and its task."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.demo import make_tiny_vl, seeing, shapes
from relax_hpc.media.canonical import canonical
from relax_hpc.media.patches import patches
from relax_hpc.media.recipe import read_recipe
from relax_hpc.prompts.records import Records
from relax_hpc.prompts.source import PromptSource

KINDS = {"vl": Qwen3VLForConditionalGeneration, "vl-moe": Qwen3VLMoeForConditionalGeneration}


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("NUM_TRAIN", 8), ("NUM_HELDOUT", 4), ("_STEPS", 2)):
            patch.setattr(make_tiny_vl, name, value)
        report = make_tiny_vl.make(folder, kind=request.param, seed=3, progress=print)
        again = make_tiny_vl.make(folder, kind=request.param, seed=3, progress=pytest.fail)
    assert report == again == json.loads((folder / "made.json").read_text())
    assert report["settings"]["kind"] == request.param and report["steps"] == 2
    return folder, request.param


def test_transformers_loads_the_very_weights(made):
    folder, kind = made
    loaded = KINDS[kind].from_pretrained(folder / "untrained")
    expected = seeing.model(kind, seeing.tokenizer(), seed=3).state_dict()
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert loaded.config.text_config.num_hidden_layers == 6
    trained = KINDS[kind].from_pretrained(folder / "model").state_dict()
    same = {name for name in expected if torch.equal(trained[name], expected[name])}
    assert {name for name in expected if ".visual." in name} == same, "it was shown no image"


def test_experts_are_turned_as_the_hub_has_them(made):
    folder, kind = made
    tensors = load_file(folder / "model" / "model.safetensors")
    experts = {n: t.shape for n, t in tensors.items() if ".layers.5.mlp.experts." in n}
    before = "model.language_model.layers.5.mlp.experts."
    expected = {before + "gate_up_proj": (4, 64, 96), before + "down_proj": (4, 48, 64)}
    assert experts == (expected if kind == "vl-moe" else {})
    assert ("lm_head.weight" in tensors) == (kind == "vl-moe")


def test_transformers_answers_a_prompt_of_the_task_and_its_image(made):
    folder, kind = made
    settings = PromptsConfig(train=[folder / "train.jsonl"])
    recipe = read_recipe(folder / "model", settings.media)
    tokens = AutoTokenizer.from_pretrained(folder / "model")
    source = PromptSource(
        Records(settings.mixture, settings), tokens, shuffle_seed=None, settings=settings,
        recipe=recipe,
    )  # fmt: skip
    model = KINDS[kind].from_pretrained(folder / "model")
    prompt = source.prompt(0)
    (medium,), (span,) = prompt.measured, prompt.spans
    ids = torch.tensor([prompt.token_ids])
    stretch = ids[0, span.first : span.first + span.tokens]
    assert set(stretch.tolist()) == {model.config.image_token_id}
    assert tokens.decode(ids[0]) == (
        "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * span.tokens
        + "<|vision_end|>colour?<|im_end|>\n<|im_start|>assistant\n"
    )  # fmt: skip
    pixels = torch.from_numpy(canonical(medium, recipe).array.copy())
    seen = {
        "pixel_values": patches(pixels, recipe.image, torch.float32),
        "image_grid_thw": torch.tensor([medium.extent.grid]),
        "mm_token_type_ids": (ids == model.config.image_token_id).int(),
    }
    with torch.no_grad():
        shown, dark = (
            model(ids, **seen | {"pixel_values": seen["pixel_values"] * scale}).logits
            for scale in (1, 0)
        )
    assert shown.isfinite().all() and not torch.equal(shown[0, -1], dark[0, -1])


def test_only_the_pixels_tell_the_colour(tmp_path):
    shapes.write(tmp_path, 40, 20, seed=1)
    rows = {
        file: [json.loads(line) for line in (tmp_path / f"{file}.jsonl").read_text().splitlines()]
        for file in ("train", "heldout")
    }
    images = [(tmp_path / row["images"][0]).read_bytes() for of in rows.values() for row in of]
    assert len(set(images)) == 60
    for count, of in zip((10, 5), rows.values(), strict=True):
        answers = [row["answer"] for row in of]
        assert {colour: answers.count(colour) for colour in shapes.COLOURS} == dict.fromkeys(
            shapes.COLOURS, count
        )
        assert answers != sorted(answers, key=list(shapes.COLOURS).index)
        assert len({json.dumps(row["prompt"]) for row in of}) == 1
        assert [row["answer"] for row in of] == [
            colour_in(Image.open(tmp_path / row["images"][0])) for row in of
        ]


def colour_in(image):
    """The colour that is nearest to most of the pixels that are not grey."""
    seen = np.asarray(image).reshape(-1, 3).astype(int)
    bright = seen[np.ptp(seen, axis=1) > 60]
    assert 200 < len(bright) < len(seen) * 0.7
    apart = [np.abs(bright - rgb).sum(axis=1).mean() for rgb in shapes.COLOURS.values()]
    return list(shapes.COLOURS)[int(np.argmin(apart))]


def test_images_come_from_the_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        shapes.write(tmp_path / name, 4, 0, seed)
    a, b, c = (
        [file.read_bytes() for file in sorted((tmp_path / name / "images").iterdir())]
        for name in "abc"
    )
    assert a == b and a != c
