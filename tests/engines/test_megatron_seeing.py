"""A model that sees: on every grid the trainer gives what Hugging Face gives."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from seeing_grids import (
    assert_alike_when_recomputed,
    assert_equal_to,
    assert_frozen,
    assert_placeholder_is_text,
    assert_read_once,
    assert_refused,
    assert_scores,
    frozen_cases,
    long,
    open_grid,
    seeing_part,
    seen,
)
from seen_rows import IMAGE, counted, image, logprobs_of, mixed_rows, rows_of_one, tokens_of
from trainers import collect, equal, job
from transformers import AutoModelForImageTextToText

from relax_hpc.config.prompts import MediaConfig
from relax_hpc.data.media.recipe import read_recipe
from relax_hpc.errors import ConfigError, TrainingError
from relax_hpc.roles.training.check import check_model, check_trainer
from relax_hpc.trainer.checkpoints import convert as conversion
from relax_hpc.trainer.megatron import fit
from relax_hpc.trainer.megatron.packing import find_feature_spans
from relax_hpc.trainer.models.hf_files import SINGLE
from relax_hpc.trainer.models.registry import read_architecture

GRIDS = ["one", "one, chunks of 20", "one, recomputed", "tp2", "pp2", "cp2", "dp2"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return seen(tmp_path_factory.mktemp("sees"), mixed_rows())


@pytest.mark.parametrize("grid", [*GRIDS, *long("tp2_pp2", "tp2_cp2", "dp2, overlapped")])
def test_a_grid_equals_hugging_face(ranks, reference, grid):
    assert_equal_to(ranks, reference, grid)


@pytest.mark.long
def test_a_grid_of_virtual_stages_equals_hugging_face(ranks, tmp_path):
    """A model of 6 layers, 3 of which take features, is too shallow for it."""
    assert_equal_to(ranks, seen(tmp_path, mixed_rows(), deeper=True), "pp2_vpp2")


@pytest.mark.parametrize("grid", long("tp2", "pp2", "cp2", "dp2"))
def test_layers_that_are_computed_again_give_the_same_update(ranks, reference, grid):
    assert_alike_when_recomputed(ranks, reference, grid)


@pytest.mark.parametrize("grid", ["one, recomputed", *long("tp2", "pp2", "cp2")])
def test_features_in_host_memory_give_the_same_update(ranks, reference, grid):
    """Bitwise; of several ranks some rows at a time are exchanged."""
    found = []
    for way in ("", ", in host memory"):
        pool = open_grid(ranks, reference, grid + way)
        pool.exchange_few_rows()
        logprobs = collect(pool.logprobs(rows=reference.rows))
        metrics = [pool.train(**reference.batch)[0] for _ in range(2)]
        found.append((logprobs, metrics, pool.weights()))
        stages = [each for each in pool.places() if each]
        assert all(each == {way != ""} for each in stages) and stages
    (expected, near, theirs), (logprobs, far, mine) = found
    assert equal(logprobs, expected) and far == near and all(map(equal, mine, theirs))


@pytest.mark.parametrize("grid", ["one", *long("tp2", "pp2", "cp2")])
def test_kept_weights_and_a_model_that_only_scores_see_as_hugging_face(ranks, reference, grid):
    assert_scores(open_grid(ranks, reference, grid), reference)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return seen(tmp_path_factory.mktemp("sparse"), rows_of_one(image(1, 4, 6)))


@pytest.mark.parametrize("grid", ["one", "dp2, overlapped", *long("dp2", "tp2", "pp2", "cp2")])
def test_ranks_and_micro_batches_without_media_equal_hugging_face(ranks, sparse, grid):
    media = open_grid(ranks, sparse, grid).media_of_micro_batches(rows=sparse.rows)
    alone = {"dp2": [[0, 0], [1, 0]], "dp2, overlapped": [[0, 0], [1, 0]]}
    assert media == alone.get(grid, [[0, 1, 0]] * len(media))
    assert_equal_to(ranks, sparse, grid)


@pytest.mark.parametrize("grid", ["one", "tp2", "dp2", "pp2"])
def test_each_medium_is_read_and_encoded_once_by_one_rank_of_a_replica(ranks, reference, grid):
    pool = open_grid(ranks, reference, grid)
    grids = {1: (1, 4, 6), 2: (1, 8, 4), 3: (3, 4, 4), 5: (1, 4, 4), 6: (1, 6, 4)}
    read, costs, patches = assert_read_once(pool, reference, grids, is_replicated=grid == "dp2")
    numbers = [number for rank in read for number in rank]
    kinds = {"videos": numbers.count(3), "images": len(numbers) - numbers.count(3)}
    assert [counted(rank) for rank in costs] == pool.size * [tokens_of(reference.rows) | kinds]
    if grid == "tp2":
        assert all(read)
    if grid == "pp2":
        assert not read[1]
    if grid == "one":  # medium 1 is in both halves of the batch
        pool.train(**reference.batch, num_portions=2)
        assert pool.encoded() == [2 * [[patches + (patches + 24), 0]]]


def test_weights_go_out_as_they_came_in_and_come_back_from_a_checkpoint(ranks, reference, tmp_path):
    """Bitwise: the folder's tensors, those of a checkpoint, and of a converted one."""
    folder = reference.folder
    tensors = load_file(folder / SINGLE)
    for grid in ("tp2", "pp2", "one"):
        pool = open_grid(ranks, reference, grid)
        assert all(equal(found, tensors) for found in pool.weights())
    pool.train(**reference.batch)
    (trained,) = pool.weights()
    name = "model.visual.pos_embed.weight"
    assert not np.array_equal(trained[name], tensors[name])
    pool.save(folder=tmp_path / "step")
    pool.train(**reference.batch)
    (after,) = pool.weights()
    for grid in ("one", "tp2"):
        pool = open_grid(ranks, reference, grid)
        pool.load(folder=tmp_path / "step")
        assert all(equal(found, trained) for found in pool.weights()), grid
        if grid == "one":
            pool.train(**reference.batch)
            assert equal(pool.weights()[0], after)
    logprobs = collect(pool.logprobs(rows=reference.rows))
    conversion.to_hf(tmp_path / "step", folder, tmp_path / "back")
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "back").float().eval()
    with torch.no_grad():
        for row, mine in zip(reference.rows, logprobs, strict=True):
            assert np.abs(logprobs_of(theirs, row, folder).numpy() - mine).max() < 1e-5
    assert equal(load_file(tmp_path / "back" / SINGLE), trained)
    conversion.to_megatron(folder, tmp_path / "core")
    conversion.to_hf(tmp_path / "core", folder, tmp_path / "same")
    assert equal(load_file(tmp_path / "same" / SINGLE), tensors)


def test_a_placeholder_that_a_policy_samples_is_text(ranks, reference):
    assert_placeholder_is_text(open_grid(ranks, reference, "one"), reference.rows[1], IMAGE)


def test_spans_that_do_not_fit_the_media_are_named(reference):
    recipe = read_recipe(reference.folder, MediaConfig())
    row = reference.rows[1]
    beyond = row._replace(media_spans=row.media_spans + np.array([0, 99, 0], np.int32))
    with pytest.raises(TrainingError, match="guid 1, sibling 0: medium 0 ends beyond token"):
        find_feature_spans([beyond], recipe)
    fewer = row._replace(media_spans=row.media_spans - np.array([0, 0, 1], np.int32))
    with pytest.raises(TrainingError, match="medium 0 has 6 features, and its spans 5 tokens"):
        find_feature_spans([fewer], recipe)


def test_a_model_whose_first_features_lie_on_a_later_stage_is_refused(reference):
    shape = read_architecture(reference.folder)
    with pytest.raises(ConfigError, match=r"= 6: leaves 1 layers to the first stage, .* first 3"):
        fit.check(job(reference.folder, "pp6").actor, shape)
    assert check_model(reference.folder, job(reference.folder).actor) == shape


FIRST, LAST = (f"num_layers_in_{which}_pipeline_stage" for which in ("first", "last"))
LAYOUT = "pipeline_model_parallel_layout"
BOTH = {f"account_for_{which}_in_pipeline_split": True for which in ("embedding", "loss")}


@pytest.mark.parametrize(
    ("grid", "settings", "layers"),
    [
        ("pp2", {FIRST: 2}, 2),
        ("pp2", {LAST: 4}, 2),
        ("pp2", {FIRST: 4}, None),
        ("pp2_vpp2", {FIRST: 2}, 1),
        ("pp2", {LAYOUT: "Ettttt|tL"}, None),
        ("pp2", {LAYOUT: "Et|tttttL"}, 1),
        ("pp2_vpp2", {LAYOUT: "Ett|tt|t|tL"}, 2),
        ("pp2", BOTH, None),
        ("pp3", {FIRST: 3, LAST: 1}, None),
    ],
)
def test_uneven_stages_are_counted_before_anything_is_queued(reference, grid, settings, layers):
    """A model of 6 layers, the first 3 of which features go into."""
    config = job(reference.folder, grid, transformer=settings)
    if layers is None:
        check_trainer(config)
        return
    with pytest.raises(ConfigError, match=f"leaves {layers} layers to the first .* first 3; give"):
        check_trainer(config)


BAD_FIELDS = [
    ("text_config", "tie_word_embeddings", False, "text_config.tie_word_embeddings = False: that"),
    ("text_config", "hidden_act", "gelu", "text_config.hidden_act = 'gelu': only 'silu'"),
    ("text_config", "rope_parameters", {"mrope_section": [6, 5, 4]}, "mrope_section = [6, 5, 4]: "),
    ("text_config", "rope_parameters", {"mrope_interleaved": False}, "mrope_interleaved = False: "),
    ("vision_config", "hidden_act", "silu", "vision_config.hidden_act = 'silu': only 'gelu_py"),
    ("vision_config", "in_channels", 1, "vision_config.in_channels = 1: only 3"),
    ("vision_config", "out_hidden_size", 48, "out_hidden_size = 48: text_config.hidden_size = 64"),
    ("vision_config", "num_position_embeddings", 63, "num_position_embeddings = 63: a square"),
    ("vision_config", "deepstack_visual_indexes", [0, 4], "deepstack_visual_indexes = [0, 4]: "),
    ("vision_config", "deepstack_visual_indexes", [2, 1], "deepstack_visual_indexes = [2, 1]: "),
    ("vision_config", "num_heads", 5, "vision_config.num_heads = 5: a divisor"),
    ("vision_config", "depth", None, "vision_config.depth = None: a positive integer"),
]


@pytest.mark.parametrize(("part", "key", "value", "message"), BAD_FIELDS)
def test_a_field_that_would_be_computed_otherwise_is_refused_by_name(
    reference, tmp_path, part, key, value, message
):
    assert_refused(reference.folder, tmp_path, part, key, value, message)


TOWER = ["vision", "vision_projection"]
PARTS = [["language"], ["vision"], ["vision_projection"], TOWER, ["language", "vision"]]
FURTHER = [
    ("pp2", ["vision_projection"]), ("pp2", TOWER), ("dp2, overlapped", TOWER),
    ("dp2, overlapped", ["language"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "parts"),
    frozen_cases(
        product(["one"], PARTS), *product(["one, recomputed", "tp2", "cp2"], PARTS), *FURTHER
    ),
)
def test_frozen_parts_do_not_move_and_the_others_learn_as_ever(ranks, reference, grid, parts):
    """Bitwise; they have no state of the optimizer, and what learns has the gradient it had."""
    assert_frozen(ranks, reference, grid, parts, seeing_part)


def test_parts_that_are_not_there_or_all_of_them_are_refused(reference):
    shape = read_architecture(reference.folder)
    for parts, of, grid, message in (
        (["language", *TOWER], shape, "one", "nothing would learn"),
        (["vision"], replace(shape, vision=None), "one", "has no parts"),
        (["language"], shape, "pp2", "pipeline_parallel = 1"),
    ):
        actor = job(reference.folder, grid, actor={"frozen": parts}).actor
        with pytest.raises(ConfigError, match=message):
            fit.check_frozen(actor.frozen, of, actor.layout)
