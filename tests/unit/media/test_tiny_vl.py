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
from relax_hpc.demo.warm_start import Outcome, _loss, accuracy
from relax_hpc.media.canonical import canonical
from relax_hpc.media.patches import patches
from relax_hpc.media.recipe import read_recipe
from relax_hpc.prompts.media_tokens import MediaTokens
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
    assert {name for name in expected if ".visual." in name} == same, "it does not learn"


def test_experts_are_turned_as_the_hub_has_them(made):
    folder, kind = made
    tensors = load_file(folder / "model" / "model.safetensors")
    experts = {n: t.shape for n, t in tensors.items() if ".layers.5.mlp.experts." in n}
    before = "model.language_model.layers.5.mlp.experts."
    expected = {before + "gate_up_proj": (4, 64, 96), before + "down_proj": (4, 48, 64)}
    assert experts == (expected if kind == "vl-moe" else {})
    assert ("lm_head.weight" in tensors) == (kind == "vl-moe")


def test_the_warm_start_shows_images_whose_colours_are_not_the_answers(tmp_path, monkeypatch):
    given = {}

    def warm_start(model, train, heldout, **settings):
        given.update(model=model, train=train, heldout=heldout)
        return Outcome(1, 0.0, 0.0, 0.0)

    for name, value in (("NUM_TRAIN", 40), ("NUM_HELDOUT", 8), ("warm_start", warm_start)):
        monkeypatch.setattr(make_tiny_vl, name, value)
    make_tiny_vl.make(tmp_path, kind="vl", seed=0, progress=print)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")

    def said(examples):
        return [tokens.decode(example.response_ids) for example in examples]

    answers = {
        file: [f"\\boxed{{{json.loads(line)['answer']}}}<|im_end|>"
               for line in (tmp_path / f"{file}.jsonl").read_text().splitlines()]
        for file in ("train", "heldout")
    }  # fmt: skip
    assert said(given["heldout"]) == answers["heldout"]
    told = said(given["train"])
    assert sorted(told) == sorted(answers["train"])
    right = sum(a == b for a, b in zip(told, answers["train"], strict=True))
    assert right < 20, "a quarter of them by chance"
    first = np.asarray(Image.open(tmp_path / "images" / "train-00000.png"))
    assert np.array_equal(given["train"][0].medium.pixels[0], first)


def test_the_loss_and_the_accuracy_are_of_what_images_show(made):
    folder, kind = made
    model = KINDS[kind].from_pretrained(folder / "model")
    tokens = AutoTokenizer.from_pretrained(folder / "model")
    examples = make_tiny_vl._examples(folder, "train.jsonl", tokens, 3)
    several = _loss(model, examples).item()
    each = [_loss(model, [example]).item() for example in examples]
    assert several == pytest.approx(sum(each) / 3, rel=1e-4), "responses are of one length"
    dark = [e._replace(medium=e.medium._replace(pixels=e.medium.pixels * 0)) for e in examples]
    assert abs(_loss(model, dark).item() - several) > 1e-6
    assert 0 <= accuracy(model, examples) <= 1


def test_transformers_answers_a_prompt_of_the_task_and_its_image(made):
    folder, kind = made
    settings = PromptsConfig(train=[folder / "train.jsonl"])
    recipe = read_recipe(folder / "model", settings.media)
    tokens = AutoTokenizer.from_pretrained(folder / "model")
    source = PromptSource(
        Records(settings.mixture, settings), tokens, shuffle_seed=None, settings=settings,
        media=MediaTokens(recipe, tokens),
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
