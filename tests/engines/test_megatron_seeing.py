"""A model that sees: on every grid the trainer gives what Hugging Face gives."""

from dataclasses import replace
from functools import partial
from itertools import product

import megatron_worker
import numpy as np
import pytest
import seeing_worker as worker
import torch
from megatron_reference import collect
from megatron_worker import job
from safetensors.torch import load_file
from seeing_grids import (
    FULL,
    assert_alike_when_recomputed,
    assert_equal_to,
    assert_frozen,
    assert_refused,
    assert_scores,
    long,
    sees_in,
)
from seen_rows import (
    IMAGE,
    counted,
    image,
    logprobs_of,
    make,
    mixed_rows,
    rows_of_one,
    tokens_of,
)
from seen_rows import reference as hugging_face
from transformers import AutoModelForImageTextToText

from relax_hpc.config.media import MediaConfig
from relax_hpc.engines.megatron import fit
from relax_hpc.engines.megatron.checkpoint import conversion
from relax_hpc.engines.megatron.flops import tower_flops
from relax_hpc.engines.megatron.vision.stretches import stretches
from relax_hpc.errors import ConfigError, TrainingError
from relax_hpc.media.recipe import read_recipe
from relax_hpc.models.hf_files import SINGLE
from relax_hpc.models.registry import read_architecture
from relax_hpc.roles.training.check import check_model, check_trainer

GRIDS = {
    "one": (1, {}, {}),
    "one, small chunks": (1, {}, {"actor": {"tower_patches": 20}}),
    "recomputed": (1, {}, {"transformer": FULL}),
    "tp2": (2, {"tensor_parallel": 2}, {}),
    "pp2": (2, {"pipeline_parallel": 2}, {}),
    "cp2": (2, {"context_parallel": 2}, {}),
    "dp2": (2, {"data_parallel": 2}, {}),
}  # fmt: skip
MORE_GRIDS = {
    "tp2_pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}, {}),
    "tp2_cp2": (4, {"tensor_parallel": 2, "context_parallel": 2}, {}),
    "dp2, overlapped": (2, {"data_parallel": 2}, {"optimizer": {"ddp": {
        "overlap_grad_reduce": True, "bucket_size": 40_000}}}),
    "pp2_vpp2": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("sees")
    return hugging_face(folder, make(folder), *mixed_rows())


def open_grid(ranks, reference, grid, frozen=(), **more):
    size, layout, options = (GRIDS | MORE_GRIDS)[grid]
    options = {"optimizer": {}, **options}
    options["actor"] = {"frozen": list(frozen), **options.get("actor", {})}
    options["optimizer"] = {"weight_decay": 0.1} | options["optimizer"]
    pool = ranks[size]
    config = job(reference.folder, layout=layout, budget=90, **options, **more)
    pool.call(worker.open_trainer, config=config)
    return pool


@pytest.mark.parametrize("grid", [*GRIDS, *long("tp2_pp2", "tp2_cp2", "dp2, overlapped")])
def test_a_grid_equals_hugging_face(ranks, reference, grid):
    """Logprobs, gradients, and the weights after two updates with torch's AdamW."""
    assert_equal_to(reference, lambda: open_grid(ranks, reference, grid))


@pytest.mark.long
def test_a_grid_of_virtual_stages_equals_hugging_face(ranks, tmp_path):
    """A model of 6 layers, 3 of which take features, is too shallow for it."""
    deeper = hugging_face(tmp_path, make(tmp_path, deeper=True), *mixed_rows())
    assert_equal_to(deeper, lambda: open_grid(ranks, deeper, "pp2_vpp2"))


@pytest.mark.parametrize("grid", long("tp2", "pp2", "cp2", "dp2"))
def test_layers_that_are_computed_again_give_the_same_update(ranks, reference, grid):
    assert_alike_when_recomputed(reference, partial(open_grid, ranks, reference, grid))


@pytest.mark.parametrize("grid", ["recomputed", *long("tp2", "pp2", "cp2")])
def test_features_in_host_memory_give_the_same_update(ranks, reference, grid, monkeypatch):
    """Bitwise; of several ranks some rows at a time are exchanged."""
    batch, found = {"rows": reference.rows, "advantages": reference.advantages}, []
    for most in (None, 0):
        actor = {} if most is None else {"features_gib": most}
        monkeypatch.setitem(GRIDS, "placed", (*GRIDS[grid][:2], GRIDS[grid][2] | {"actor": actor}))
        pool = open_grid(ranks, reference, "placed")
        pool.call(worker.exchange_few_rows)
        logprobs = collect(pool.call(worker.logprobs, rows=reference.rows))
        metrics = [pool.call(worker.train, **batch)[0] for _ in range(2)]
        found.append((logprobs, metrics, pool.call(worker.weights)))
        stages = [each for each in pool.call(worker.places) if each]
        assert all(each == {most == 0} for each in stages) and stages
    (expected, near, theirs), (logprobs, far, mine) = found
    assert all(map(np.array_equal, logprobs, expected)) and far == near
    for ours, others in zip(mine, theirs, strict=True):
        assert all(np.array_equal(ours[name], others[name]) for name in others)


@pytest.mark.parametrize("grid", ["one", *long("tp2", "pp2", "cp2")])
def test_kept_weights_and_a_model_that_only_scores_see_as_hugging_face(ranks, reference, grid):
    assert_scores(reference, open_grid(ranks, reference, grid))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("sparse")
    return hugging_face(folder, make(folder), *rows_of_one(image(1, 4, 6)))


@pytest.mark.parametrize("grid", ["one", "dp2, overlapped", *long("dp2", "tp2", "pp2", "cp2")])
def test_ranks_and_micro_batches_without_media_equal_hugging_face(ranks, sparse, grid):
    media = open_grid(ranks, sparse, grid).call(worker.media_of_micro_batches, rows=sparse.rows)
    alone = {"dp2": [[0, 0], [1, 0]], "dp2, overlapped": [[0, 0], [1, 0]]}
    assert media == alone.get(grid, [[0, 1, 0]] * len(media))
    assert_equal_to(sparse, lambda: open_grid(ranks, sparse, grid))


@pytest.mark.parametrize("grid", ["one", "tp2", "dp2", "pp2"])
def test_each_medium_is_read_and_encoded_once_by_one_rank_of_a_replica(ranks, reference, grid):
    pool = open_grid(ranks, reference, grid)
    pool.call(worker.train, rows=reference.rows, advantages=reference.advantages)
    read = pool.call(worker.read)
    costs = pool.call(megatron_worker.costs)
    # Of media 1, 2, 3, 5 and 6; a medium that both replicas see is computed by both.
    shape = read_architecture(reference.folder).vision
    grids = {1: (1, 4, 6), 2: (1, 8, 4), 3: (3, 4, 4), 5: (1, 4, 4), 6: (1, 6, 4)}
    seen = grids.values() if grid != "dp2" else [grids[n] for rank in read for n in rank]
    videos = sum(each[0] > 1 for each in seen)
    expected = tokens_of(reference.rows) | {"videos": videos, "images": len(seen) - videos}
    for rank in costs:
        assert rank["train/tower_tflops"] == pytest.approx(tower_flops(shape, seen) / 1e12)
        assert counted(rank) == expected
        assert rank["time/towers"] > 0
    everything = {
        int.from_bytes(medium.canonical_xxh3, "little")
        for row in reference.rows
        for medium in row.media
    }
    assert everything == {1, 2, 3, 5, 6}
    assert {number for rank in read for number in rank} == everything
    for rank in read:
        assert len(rank) == len(set(rank)), "three rows see medium 1"
    if grid != "dp2":
        assert sum(map(len, read)) == len(everything)
    patches = sum(np.prod(each) for each in seen)
    assert np.sum(pool.call(worker.encoded), axis=0).tolist() == 2 * [[patches, 0]]
    if grid == "tp2":
        assert all(read)
    if grid == "pp2":
        assert not read[1]
    if grid == "one":  # medium 1 is in both halves of the batch
        pool.call(
            worker.train, rows=reference.rows, advantages=reference.advantages, num_portions=2
        )
        assert pool.call(worker.encoded) == [2 * [[patches + (patches + 24), 0]]]


def test_weights_go_out_as_they_came_in_and_come_back_from_a_checkpoint(ranks, reference, tmp_path):
    """Bitwise: the folder's tensors, those of a checkpoint, and of a converted one."""
    folder = reference.folder
    tensors = {name: tensor.numpy() for name, tensor in load_file(folder / SINGLE).items()}
    batch = {"rows": reference.rows, "advantages": reference.advantages}
    for grid in ("tp2", "pp2", "one"):
        pool = open_grid(ranks, reference, grid)
        for found in pool.call(worker.weights):
            assert found.keys() == tensors.keys()
            for name, expected in tensors.items():
                assert found[name].shape == expected.shape
                assert np.array_equal(found[name], expected), name
    pool.call(worker.train, **batch)
    (trained,) = pool.call(worker.weights)
    assert not np.array_equal(trained["model.visual.pos_embed.weight"],
                              tensors["model.visual.pos_embed.weight"])  # fmt: skip
    pool.call(megatron_worker.save, folder=tmp_path / "step")
    pool.call(worker.train, **batch)
    (after,) = pool.call(worker.weights)
    for grid in ("one", "tp2"):
        pool = open_grid(ranks, reference, grid)
        pool.call(megatron_worker.load, folder=tmp_path / "step")
        for found in pool.call(worker.weights):
            assert all(np.array_equal(found[name], trained[name]) for name in trained), grid
        if grid == "one":
            pool.call(worker.train, **batch)
            (again,) = pool.call(worker.weights)
            assert all(np.array_equal(again[name], after[name]) for name in after)
    logprobs = collect(pool.call(worker.logprobs, rows=reference.rows))
    conversion.to_hf(tmp_path / "step", folder, tmp_path / "back")
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "back").float().eval()
    with torch.no_grad():
        for row, mine in zip(reference.rows, logprobs, strict=True):
            assert np.abs(logprobs_of(theirs, row, folder).numpy() - mine).max() < 1e-5
    exported = load_file(tmp_path / "back" / SINGLE)
    assert exported.keys() == tensors.keys()
    assert all(np.array_equal(exported[name].numpy(), trained[name]) for name in trained)
    conversion.to_megatron(folder, tmp_path / "core")
    conversion.to_hf(tmp_path / "core", folder, tmp_path / "same")
    same = load_file(tmp_path / "same" / SINGLE)
    assert all(np.array_equal(same[name].numpy(), tensors[name]) for name in tensors)


def test_a_placeholder_that_a_policy_samples_is_text(ranks, reference):
    """Its row has logprobs as if the token were any other: the embedding's, in no grid."""
    pool = open_grid(ranks, reference, "one")
    row = reference.rows[1]
    ids = row.token_ids.copy()
    ids[-3] = IMAGE
    (found,) = collect(pool.call(worker.logprobs, rows=[row._replace(token_ids=ids)]))
    (plain,) = collect(pool.call(worker.logprobs, rows=[row]))
    assert np.array_equal(found[:-3], plain[:-3])
    assert np.isfinite(found).all() and not np.allclose(found[-2:], plain[-2:])


def test_spans_that_do_not_fit_the_media_are_named(reference):
    recipe = read_recipe(reference.folder, MediaConfig())
    row = reference.rows[1]
    beyond = row._replace(media_spans=row.media_spans + np.array([0, 99, 0], np.int32))
    with pytest.raises(TrainingError, match="guid 1, sibling 0: medium 0 ends beyond token"):
        stretches([beyond], recipe)
    fewer = row._replace(media_spans=row.media_spans - np.array([0, 0, 1], np.int32))
    with pytest.raises(TrainingError, match="medium 0 has 6 features, and its spans 5 tokens"):
        stretches([fewer], recipe)


def test_a_model_whose_first_features_lie_on_a_later_stage_is_refused(reference):
    shape = read_architecture(reference.folder)
    with pytest.raises(ConfigError, match=r"= 6: leaves 1 layers to the first stage, .* first 3"):
        fit.check(job(reference.folder, layout={"pipeline_parallel": 6}).actor, shape)
    assert check_model(reference.folder, job(reference.folder).actor) == shape


_PP2, _PP3 = {"pipeline_parallel": 2}, {"pipeline_parallel": 3}


@pytest.mark.parametrize(
    ("layout", "settings", "layers"),
    [
        (_PP2, {"num_layers_in_first_pipeline_stage": 2}, 2),
        (_PP2, {"num_layers_in_last_pipeline_stage": 4}, 2),
        (_PP2, {"num_layers_in_first_pipeline_stage": 4}, None),
        (_PP2 | {"virtual_pipeline": 2}, {"num_layers_in_first_pipeline_stage": 2}, 1),
        (_PP2, {"pipeline_model_parallel_layout": "Ettttt|tL"}, None),
        (_PP2, {"pipeline_model_parallel_layout": "Et|tttttL"}, 1),
        (_PP2 | {"virtual_pipeline": 2}, {"pipeline_model_parallel_layout": "Ett|tt|t|tL"}, 2),
        (_PP2, {"account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True}, None),
        (_PP3, {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1},
         None),
    ],
)  # fmt: skip
def test_uneven_stages_are_counted_before_anything_is_queued(reference, layout, settings, layers):
    """A model of 6 layers, the first 3 of which features go into."""
    config = job(reference.folder, layout=layout, transformer=settings)
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


PARTS = [
    ["language"], ["vision"], ["vision_projection"], ["vision", "vision_projection"],
    ["language", "vision"],
]  # fmt: skip
FURTHER = [
    ("pp2", ["vision_projection"]), ("pp2", ["vision", "vision_projection"]),
    ("dp2, overlapped", ["vision", "vision_projection"]), ("dp2, overlapped", ["language"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "parts"),
    [
        *(pytest.param("one", parts, id="+".join(parts)) for parts in PARTS),
        *(
            pytest.param(grid, parts, id=f"{grid}-{'+'.join(parts)}", marks=pytest.mark.long)
            for grid, parts in [*product(["recomputed", "tp2", "cp2"], PARTS), *FURTHER]
        ),
    ],
)
def test_frozen_parts_do_not_move_and_the_others_learn_as_ever(ranks, reference, grid, parts):
    """Bitwise; they have no state of the optimizer, and what learns has the gradient it had."""
    pool = open_grid(ranks, reference, grid, frozen=parts)
    states, learning = assert_frozen(reference, pool, lambda name: sees_in(name, parts))
    if grid in ("one", "recomputed"):
        assert states == [learning]


def test_parts_that_are_not_there_or_all_of_them_are_refused(reference, tmp_path):
    shape = read_architecture(reference.folder)
    everything = ["language", "vision", "vision_projection"]
    for parts, of, layout, message in (
        (everything, shape, {}, "nothing would learn"),
        (["vision"], replace(shape, vision=None), {}, "has no parts"),
        (["language"], shape, {"pipeline_parallel": 2}, "pipeline_parallel = 1"),
    ):
        actor = job(reference.folder, layout=layout, actor={"frozen": parts}).actor
        with pytest.raises(ConfigError, match=message):
            fit.check_frozen(actor.frozen, of, actor.layout)
