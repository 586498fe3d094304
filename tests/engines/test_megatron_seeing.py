"""A model that sees: on every grid the trainer gives what Hugging Face gives."""

import json
from itertools import product

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from seeing_grids import (
    assert_equal_to,
    assert_exported,
    assert_frozen,
    frozen_cases,
    long,
    open_grid,
    seeing_part,
    seen,
)
from seen_rows import counted, image, mixed_rows, rows_of_one, tokens_of
from trainers import assert_close, collect, equal, job
from transformers import AutoModelForImageTextToText

from relax_hpc.config.prompts import MediaConfig
from relax_hpc.data.media.recipe import read_recipe
from relax_hpc.errors import ConfigError, TrainingError
from relax_hpc.roles.training.check import check_trainer
from relax_hpc.trainer.checkpoints import convert as conversion
from relax_hpc.trainer.megatron.costs import tower_flops
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


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return seen(tmp_path_factory.mktemp("experts"), mixed_rows(), kind="vl-moe")


OF_EXPERTS = ["tp2", "pp2", "tp2_ep2", "tp2_etp2", "cp2_ep2", "pp2_dp2_ep2", "tp2_pp2, recomputed"]


@pytest.mark.parametrize("grid", ["one", "dp2_ep2", *long(*OF_EXPERTS)])
def test_a_grid_with_experts_equals_hugging_face(ranks, experts, grid):
    assert_equal_to(ranks, experts, grid)


@pytest.mark.parametrize("grid", ["one", *long("tp2", "pp2", "cp2")])
def test_kept_weights_and_a_model_that_only_scores_see_as_hugging_face(ranks, reference, grid):
    pool, rows = open_grid(ranks, reference, grid), reference.rows
    first = pool.logprobs(rows=rows)
    pool.keep()
    pool.train(**reference.batch)
    trained, again = pool.logprobs(rows=rows), pool.kept_logprobs(rows=rows)
    for mine, kept, then in zip(first, again, trained, strict=True):
        assert equal(kept, mine)
        assert not any(np.allclose(then[row], mine[row], rtol=0, atol=1e-4) for row in mine)
    last = len(rows) - 1
    micro_batches = [[3, 0, last], [1, 2], [], list(range(4, last))]
    assert pool.open_scorer() == [[]] * pool.size
    for found in pool.scorer_logprobs(rows=rows, micro_batches=micro_batches):
        assert_close(found, reference.logprobs, atol=2e-6, rtol=0)


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
    """One that both replicas see, twice."""
    pool = open_grid(ranks, reference, grid)
    pool.train(**reference.batch)
    grids = {1: (1, 4, 6), 2: (1, 8, 4), 3: (3, 4, 4), 5: (1, 4, 4), 6: (1, 6, 4)}
    read = pool.read()
    numbers = [number for rank in read for number in rank]
    assert {*numbers} == {*grids} and all(len(rank) == len({*rank}) for rank in read)
    assert grid == "dp2" or len(numbers) == len(grids)
    seen = [grids[number] for number in numbers]
    patches = sum(np.prod(each) for each in seen)
    assert np.sum(pool.encoded(), axis=0).tolist() == 2 * [[patches, 0]]
    flops = tower_flops(read_architecture(reference.folder).vision, seen)
    kinds = {"videos": numbers.count(3), "images": len(numbers) - numbers.count(3)}
    for rank in pool.costs():
        assert rank["train/tower_tflops"] == pytest.approx(flops / 1e12)
        assert counted(rank) == tokens_of(reference.rows) | kinds
    assert all(read) or grid != "tp2"
    if grid == "pp2":
        assert not read[1]
    if grid == "one":  # medium 1 is in both halves of the batch
        pool.train(**reference.batch, num_portions=2)
        assert pool.encoded() == [2 * [[patches + (patches + 24), 0]]]


@pytest.mark.parametrize("model", ["reference", "experts"])
def test_weights_go_out_as_they_came_in(ranks, request, tmp_path, model):
    known, kind = request.getfixturevalue(model), AutoModelForImageTextToText
    grids = ("tp2", "pp2") if model == "reference" else ("tp2", "dp2_ep2")
    assert_exported(ranks, known, known.folder, grids, tmp_path, kind)


def test_experts_that_are_not_transposed_are_refused_by_their_shape(experts, tmp_path):
    (tmp_path / "config.json").write_bytes((experts.folder / "config.json").read_bytes())
    tensors = load_file(experts.folder / SINGLE)
    name = next(name for name in tensors if name.endswith("experts.down_proj"))
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ConfigError, match=r"down_proj is \[4, 64, 48\], but .* \[4, 48, 64\]"):
        conversion.to_megatron(tmp_path, tmp_path / "core")


def test_spans_that_do_not_fit_the_media_are_named(reference):
    recipe = read_recipe(reference.folder, MediaConfig())
    row = reference.rows[1]
    beyond = row._replace(media_spans=row.media_spans + np.array([0, 99, 0], np.int32))
    with pytest.raises(TrainingError, match="guid 1, sibling 0: medium 0 ends beyond token"):
        find_feature_spans([beyond], recipe)
    fewer = row._replace(media_spans=row.media_spans - np.array([0, 0, 1], np.int32))
    with pytest.raises(TrainingError, match="medium 0 has 6 features, and its spans 5 tokens"):
        find_feature_spans([fewer], recipe)


FIRST, LAST, LAYOUT = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
)
BOTH = {f"account_for_{which}_in_pipeline_split": True for which in ("embedding", "loss")}


@pytest.mark.parametrize(
    ("grid", "settings", "layers"),
    [
        ("pp2", {FIRST: 2}, 2),
        ("pp2", {LAST: 4}, 2),
        ("pp2", {FIRST: 4}, None),
        ("pp2_vpp2", {FIRST: 2}, 1),
        ("pp2", {LAYOUT: "Et|tttttL"}, 1),
        ("pp2_vpp2", {LAYOUT: "Ett|tt|t|tL"}, 2),
        ("pp2", BOTH, None),
    ],
)
def test_uneven_stages_are_counted_before_anything_is_queued(reference, grid, settings, layers):
    """A model of 6 layers, the first 3 of which features go into."""
    config = job(reference.folder, grid, transformer=settings)
    shape = read_architecture(reference.folder)
    if layers is None:
        check_trainer(config, shape)
        return
    with pytest.raises(ConfigError, match=f"leaves {layers} layers to the first .* first 3; give"):
        check_trainer(config, shape)


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("text_config", "tie_word_embeddings", False, "tie_word_embeddings = False: that"),
        ("text_config", "rope_parameters", {"mrope_section": [6, 5, 4]}, "= [6, 5, 4]: "),
        ("vision_config", "hidden_act", "silu", "hidden_act = 'silu': only 'gelu_py"),
        ("vision_config", "out_hidden_size", 48, "= 48: text_config.hidden_size = 64"),
        ("vision_config", "num_position_embeddings", 63, "= 63: a square"),
        ("vision_config", "deepstack_visual_indexes", [2, 1], "= [2, 1]: "),
    ],
)
def test_a_field_that_would_be_computed_otherwise_is_refused_by_name(
    reference, tmp_path, part, key, value, message
):
    record = json.loads((reference.folder / "config.json").read_text())
    record[part][key] = value
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError) as refused:
        read_architecture(tmp_path)
    assert message in str(refused.value) and "\n" not in str(refused.value)


TOWER = ["vision", "vision_projection"]
PARTS = [["language"], ["vision"], ["vision_projection"], TOWER, ["language", "vision"]]
FURTHER = [("pp2", ["vision_projection"]), ("pp2", TOWER), ("dp2, overlapped", TOWER)]


@pytest.mark.parametrize(
    ("grid", "parts"), frozen_cases(product(["one"], PARTS), *product(["tp2"], PARTS), *FURTHER)
)
def test_frozen_parts_do_not_move_and_the_others_learn_as_ever(ranks, reference, grid, parts):
    """Bitwise; they have no state of the optimizer, and what learns has the gradient it had."""
    assert_frozen(ranks, reference, grid, parts, seeing_part)


@pytest.mark.parametrize(
    ("grid", "parts"), frozen_cases([("one", TOWER)], ("dp2_ep2", ["language"]), ("tp2_ep2", TOWER))
)
def test_beside_experts_frozen_parts_do_not_move_either(ranks, experts, grid, parts):
    assert_frozen(ranks, experts, grid, parts, seeing_part)
