"""The benchmark of media: same work both ways, figures that fit each other, real media."""

import asyncio
import time

import media
import media_engine
import media_prepare
import media_towers
import pytest
from media_shapes import SHAPES, encoded, model_folder, pixels, recipe_of
from sglang_under_test import SGLANG_PYTHON

from relax_hpc.trainer.models.registry import read_architecture


def by_name(rows):
    found = {row.name: row for row in rows}
    assert len(found) == len(rows), "every row has a name of its own"
    return found


def test_what_is_measured_is_qwen3_vl_4b(tmp_path):
    """Its tower has 415 million weights."""
    shape = read_architecture(model_folder("qwen3-vl-4b", tmp_path)).vision
    hidden, inner, merged = shape.hidden_size, shape.ffn_hidden_size, shape.hidden_size * 4
    layer = 4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner
    merger = merged * (merged + shape.out_size + 1) + shape.out_size
    norms = 2 * hidden + 3 * 2 * merged
    total = 24 * layer + 4 * merger + norms + hidden * (shape.patch_values + 1 + shape.positions**2)
    assert (shape.num_layers, shape.levels) == (24, 4) and total == pytest.approx(415e6, rel=2e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_ids_of_the_tokenizer_are_those_of_the_shape(tmp_path, shape):
    from transformers import AutoTokenizer

    folder = model_folder(shape, tmp_path)
    family, tokens = recipe_of(folder).family, AutoTokenizer.from_pretrained(folder)
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    written = tokens.encode(family.wrapped["image"], add_special_tokens=False)
    assert written == [SHAPES[shape][name] for name in names]


def test_photos_are_as_large_as_real_ones():
    photo = pixels(0, 500, 500)
    jpeg, png = (8 * len(encoded(photo, kind)) / 500**2 for kind in ("JPEG", "PNG"))
    assert 1 < jpeg < 4 < png < 18, "bits per pixel"
    assert (pixels(1, 500, 500) != photo).mean() > 0.9


def test_a_held_loop_is_noticed():
    async def held():
        watch = asyncio.create_task(media_prepare._watch(stop := asyncio.Event()))
        await asyncio.sleep(0.01)
        begin = time.thread_time()
        while time.thread_time() - begin < 0.05:
            pass
        await asyncio.sleep(0.01)
        stop.set()
        return await watch

    holds = asyncio.run(held())
    assert holds.cpu_s >= 0.05 and holds.wall_s >= 0.045


def test_a_sample_has_a_png_of_its_own_and_siblings_share_an_image_on_the_bus(monkeypatch):
    made = []

    def counted(array, kind):
        made.append(kind)
        return encoded(array, kind)

    monkeypatch.setattr(media_prepare, "encoded", counted)
    work = media_prepare.Work(side=256, images=4, repeats=2, workers=1)
    cpu, _, _, _, one, four = media_prepare.measure("tiny", work)
    assert made.count("PNG") == 3 * 8 and made.count("JPEG") == 4
    assert cpu.value > 0 and cpu.baseline > 0
    assert 1 < one.value < 1.5 and 1 < four.value < 1.1, "of the bytes of the files"


def test_the_towers_compute_the_same_and_every_row_is_there():
    work = media_towers.Work(
        large=((2, (64, 96)),), small=(5, (64, 64)), memory=(1, 3), memory_size=(64, 64),
        tower_patches=32, repeats=1, shared=True,
    )  # fmt: skip
    found = by_name(media_towers.measure("tiny", work))
    assert list(found) == [
        "forward, 2 x 64 x 96",
        "forward and backward, 5 x 64 x 64",
        "largest difference from Hugging Face's features",
        "1 x 64 x 64, features, then gradients",
        "3 x 64 x 64, features, then gradients",
        "3 x 64 x 64, features, then gradients, TP2",
    ]
    shared, alone = (found[f"3 x 64 x 64, features, then gradients{of}"] for of in (", TP2", ""))
    assert (shared.baseline, shared.ratio) == (alone.value, shared.value / alone.value)
    apart = found["largest difference from Hugging Face's features"].value
    assert 0 < apart < 2e-6, "two computations of the same"


def test_the_share_of_the_tower_is_of_a_group_of_eight_rows(tmp_path):
    """Qwen3-VL-4B's language model has 4.02e9 weights in products, and attends 36 x 4,096 wide."""
    shape = read_architecture(model_folder("qwen3-vl-4b", tmp_path))
    flops = 6 * 4.02e9 * 8 * 2124 + 6 * 36 * 4096 * 8 * 2124**2
    seconds = media_towers.language_seconds(shape, 2124, 0.45 * 989e12)
    assert seconds == pytest.approx(flops / (0.45 * 989e12), rel=1e-2)
    assert media_towers.share(1.0, 4.0) == 0.2


def test_the_ratio_of_requests_is_the_median_of_those_within_a_turn():
    figures = media_engine.Figures([1.0, 2.0, 4.0], [6.0, 10.0, 28.0], [3.0, 3.0, 3.0], [1, 1.2, 1])
    both, encoded, ours, png = media_engine.rows(figures, media_engine.Work(images=5, siblings=2))
    assert (both.value, both.baseline, both.ratio) == (5.0, 1.0, 6.0)
    assert (encoded.value, ours.value, png.value) == (1.2, 2.0, 3.0)


def test_what_nobody_knows_is_named():
    works = media.works_of("tiny")
    with pytest.raises(ValueError, match="--part nothing: is none of prepare, towers, engine"):
        next(media.measure(["nothing"], "tiny", works))
    with pytest.raises(ValueError, match="--shape nothing"):
        next(media.measure(["prepare"], "nothing", works))


def test_options_go_to_the_parts_that_they_are_of():
    works = media.works_of("qwen3-vl-4b", tower_patches=8192, mfu=0.5, workers=3, repeats=2)
    assert (works.towers.tower_patches, works.towers.mfu) == (8192, 0.5)
    assert works.prepare[-2:] == (2, 3) and works.engine[-2:] == (2, 3)
    assert works.towers.repeats == 2 and works.towers.large == media_towers.Work().large


@pytest.mark.sglang
@pytest.mark.skipif(not SGLANG_PYTHON, reason="needs SGLang")
def test_both_ways_get_their_tokens_of_a_real_engine():
    work = media_engine.Work(images=2, siblings=2, side=64, repeats=1, workers=1)
    both, encoded, ours, png = media_engine.measure("tiny", work, python=SGLANG_PYTHON)
    assert encoded.value == 1, "the sibling waited, and found the image in the engine's cache"
    assert both.ratio == pytest.approx(both.value / both.baseline)
    assert both.value == pytest.approx(4 / ours.value) and png.value > 0
