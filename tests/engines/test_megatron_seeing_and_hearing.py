"""A model that sees and hears: on every grid the trainer gives what Hugging Face gives."""

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
from safetensors.torch import load_file, save_file
from seeing_grids import (
    FULL,
    assert_alike_when_recomputed,
    assert_equal_to,
    assert_frozen,
    assert_scores,
    long,
)
from seen_rows import (
    AUDIO,
    counted,
    logprobs_of,
    make,
    mixed_rows_heard,
    row,
    sound,
    tokens_of,
)
from seen_rows import reference as hugging_face
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from relax_hpc.checkpoints.export import save_hf
from relax_hpc.engines.megatron import fit
from relax_hpc.engines.megatron.checkpoint import conversion
from relax_hpc.engines.megatron.flops import hearing_flops, tower_flops
from relax_hpc.errors import ConfigError
from relax_hpc.models.hf_files import SINGLE
from relax_hpc.models.registry import read_architecture
from relax_hpc.roles.training.check import check_model, check_weights

GRIDS = {
    "one": (1, {}, {}),
    "one, small chunks, features in host memory": (
        1,
        {},
        {"actor": {"tower_patches": 60, "features_gib": 0}},
    ),
    "tp2": (2, {"tensor_parallel": 2}, {}),
    "pp2": (2, {"pipeline_parallel": 2}, {}),
    "ep2": (2, {"data_parallel": 2, "expert_parallel": 2}, {}),
}
MORE_GRIDS = {
    "recomputed": (1, {}, {"transformer": FULL}),
    "dp2": (2, {"data_parallel": 2}, {}),
    "cp2": (2, {"context_parallel": 2}, {}),
    "tp2_pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}, {}),
    "tp2_etp2": (2, {"tensor_parallel": 2, "expert_tensor_parallel": 2}, {}),
    "etp2": (2, {"data_parallel": 2, "expert_tensor_parallel": 2}, {}),
    "cp2_ep2": (2, {"context_parallel": 2, "expert_parallel": 2}, {}),
    "cp2_ep2, recomputed": (2, {"context_parallel": 2, "expert_parallel": 2},
                            {"transformer": FULL}),
    "tp2_etp2, recomputed": (2, {"tensor_parallel": 2, "expert_tensor_parallel": 2},
                             {"transformer": FULL}),
    "tp2_ep2": (2, {"tensor_parallel": 2, "expert_parallel": 2}, {}),
    "tp2_cp2": (4, {"tensor_parallel": 2, "context_parallel": 2}, {}),
    "dp2, overlapped": (2, {"data_parallel": 2}, {"optimizer": {"ddp": {
        "overlap_grad_reduce": True, "bucket_size": 40_000}}}),
}  # fmt: skip
DEEPER_GRIDS = {
    "pp2_vpp2": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}, {}),
    "pp2_vpp2, recomputed": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2},
                             {"transformer": FULL}),
    "tp2_pp2_vpp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2}, {}),
}  # fmt: skip
"""Those that a model of 6 layers, 3 of which take features, is too shallow for."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hears")
    return hugging_face(folder, make(folder, kind="omni"), *mixed_rows_heard())


@pytest.fixture(scope="module")
def deeper(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("deeper")
    model = make(folder, kind="omni", deeper=True)
    return hugging_face(folder, model, *mixed_rows_heard())


def open_grid(ranks, reference, grid, frozen=(), **more):
    size, layout, options = (GRIDS | MORE_GRIDS | DEEPER_GRIDS)[grid]
    options = {"optimizer": {}, **options}
    options["actor"] = {"frozen": list(frozen), **options.get("actor", {})}
    options["optimizer"] = {"weight_decay": 0.1} | options["optimizer"]
    pool = ranks[size]
    config = job(reference.folder, layout=layout, budget=240, **options, **more)
    pool.call(worker.open_trainer, config=config)
    return pool


@pytest.mark.parametrize("grid", [*GRIDS, *long(*MORE_GRIDS)])
def test_a_grid_equals_hugging_face(ranks, reference, grid):
    """Logprobs, gradients, and the weights after two updates with torch's AdamW."""
    assert_equal_to(reference, lambda: open_grid(ranks, reference, grid))


@pytest.mark.parametrize("grid", ["pp2_vpp2", *long("pp2_vpp2, recomputed", "tp2_pp2_vpp2")])
def test_a_grid_of_virtual_stages_equals_hugging_face(ranks, deeper, grid):
    assert read_architecture(deeper.folder).num_layers == 8
    assert_equal_to(deeper, lambda: open_grid(ranks, deeper, grid))


@pytest.mark.long
def test_layers_that_are_computed_again_give_the_same_update(ranks, reference):
    assert_alike_when_recomputed(reference, partial(open_grid, ranks, reference, "ep2"))


@pytest.mark.parametrize("grid", long("one", "ep2"))
def test_kept_weights_and_a_model_that_only_scores_hear_as_hugging_face(ranks, reference, grid):
    assert_scores(reference, open_grid(ranks, reference, grid))


@pytest.mark.parametrize("grid", ["one", "tp2", "pp2", *long("dp2", "cp2")])
def test_each_medium_is_read_and_encoded_once_by_one_rank_of_a_replica(ranks, reference, grid):
    pool = open_grid(ranks, reference, grid)
    pool.call(worker.train, rows=reference.rows, advantages=reference.advantages)
    read = pool.call(worker.read)
    shape = read_architecture(reference.folder)
    grids = {1: (1, 4, 6), 2: (1, 8, 4), 3: (3, 4, 4), 7: (2, 4, 6)}
    # 37 mel frames are 5 tokens; 230 are 13 + 13 + 4, 451 four times 13 and 7.
    tokens = {37004: 5, 230005: 30, 451006: 59, 210008: 28, 120009: 16, 55010: 7}
    everything = grids.keys() | tokens.keys()
    seen = everything if grid != "dp2" else [number for rank in read for number in rank]
    flops = tower_flops(shape.vision, [grids[n] for n in seen if n in grids])
    flops += hearing_flops(shape.audio, [tokens[n] for n in seen if n in tokens])
    for rank in pool.call(megatron_worker.costs):
        assert rank["train/tower_tflops"] == pytest.approx(flops / 1e12)
        assert counted(rank).items() >= tokens_of(reference.rows).items()
        assert rank["train/media/audios"] == sum(number in tokens for number in seen)
        assert rank["time/towers"] > 0
    assert {number for rank in read for number in rank} == everything
    for rank in read:
        assert len(rank) == len(set(rank)), "two rows hear sound 4"
    if grid != "dp2":
        assert sum(map(len, read)) == len(everything)
    patches = sum(np.prod(grids[number]) for number in seen if number in grids)
    frames = sum(number // 1000 for number in seen if number in tokens)
    assert np.sum(pool.call(worker.encoded), axis=0).tolist() == 2 * [[patches, frames]]
    if grid == "tp2":
        assert all(read)
    if grid == "pp2":
        assert not read[1]


def assert_same(found, given):
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_weights_go_out_as_they_came_in(ranks, reference, tmp_path):
    """Bitwise, talker and code2wav with them, of another type than the thinker; after a step, too,
    transformers computes of the export what the trainer does."""
    folder = reference.folder
    given = load_file(folder / SINGLE)
    speaks = {name for name in given if not name.startswith("thinker.")}
    given |= {name: given[name].bfloat16() for name in speaks}
    other = make_like(folder, tmp_path / "given", given)
    assert len(speaks) > 100
    check_weights(other, read_architecture(other))
    for grid in ("one", "tp2", "pp2", "ep2"):
        for number, found in enumerate(open_grid(ranks, reference, grid).call(worker.weights)):
            out = tmp_path / f"{grid}-{number}"
            tensors = ((name, torch.from_numpy(tensor)) for name, tensor in found.items())
            save_hf(out, tensors, other, write=True)
            assert_same(load_file(out / SINGLE), given)
    pool = open_grid(ranks, reference, "one")
    pool.call(worker.train, rows=reference.rows, advantages=reference.advantages)
    [trained] = pool.call(worker.logprobs, rows=reference.rows)
    pool.call(megatron_worker.save, folder=tmp_path / "step")
    conversion.to_hf(tmp_path / "step", other, tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / SINGLE)
    assert exported.keys() == given.keys()
    assert all(torch.equal(exported[name], given[name]) for name in speaks)
    kind = Qwen3OmniMoeThinkerForConditionalGeneration
    model = kind.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        for number, each in enumerate(reference.rows):
            theirs = logprobs_of(model, each, folder).numpy()
            assert np.abs(trained[number] - theirs).max() < 1e-5
            assert np.abs(trained[number] - reference.logprobs[number]).max() > 1e-3
    conversion.to_megatron(other, tmp_path / "core")
    conversion.to_hf(tmp_path / "core", other, tmp_path / "same")
    assert_same(load_file(tmp_path / "same" / SINGLE), given)


def make_like(folder, other, tensors):
    other.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (other / path.name).write_bytes(path.read_bytes())
    save_file(tensors, other / SINGLE, metadata={"format": "pt"})
    return other


def test_a_tensor_that_nobody_knows_is_refused(reference, tmp_path):
    tensors = load_file(reference.folder / SINGLE)
    more = make_like(reference.folder, tmp_path / "more", tensors | {"listener.x": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"has 1 tensors that .*qwen3_omni_moe.* listener\.x"):
        check_weights(more, read_architecture(more))
    tensors.pop("thinker.audio_tower.proj1.bias")
    less = make_like(reference.folder, tmp_path / "less", tensors)
    with pytest.raises(ConfigError, match=r"has no tensor thinker\.audio_tower\.proj1\.bias"):
        check_weights(less, read_architecture(less))


def test_a_placeholder_of_sound_that_a_policy_samples_is_text(ranks, reference):
    pool = open_grid(ranks, reference, "one")
    sampled = reference.rows[1]
    ids = sampled.token_ids.copy()
    ids[-3] = AUDIO
    (found,) = collect(pool.call(worker.logprobs, rows=[sampled._replace(token_ids=ids)]))
    (plain,) = collect(pool.call(worker.logprobs, rows=[sampled]))
    assert np.array_equal(found[:-3], plain[:-3])
    assert np.isfinite(found).all() and not np.allclose(found[-2:], plain[-2:])


def test_spans_that_do_not_fit_the_sound_are_named(ranks, reference):
    pool = open_grid(ranks, reference, "one")
    heard = row(9, [sound(8, 130)])
    fewer = heard._replace(media_spans=heard.media_spans - np.array([0, 0, 1], np.int32))
    message = "guid 9, sibling 0: medium 0 has 130 mel frames, 17 tokens, and its spans 16 tokens"
    with pytest.raises(Exception, match=message):
        pool.call(worker.logprobs, rows=[fewer])


FROZEN = {
    "vision": "thinker.visual.", "vision_projection": "thinker.visual.merger",
    "audio": "thinker.audio_tower.", "audio_projection": "thinker.audio_tower.proj",
}  # fmt: skip


def part_of(name):
    """The part with the longest beginning that fits."""
    fitting = [part for part, prefix in FROZEN.items() if name.startswith(prefix)]
    return max(fitting, key=lambda part: len(FROZEN[part]), default="language")


TOWERS = ["audio", "audio_projection", "vision", "vision_projection"]
PARTS = [["audio"], ["audio_projection"], ["language", "vision", "vision_projection"], TOWERS]


@pytest.mark.parametrize(
    ("grid", "parts"),
    [
        *(pytest.param("one", parts, id="+".join(parts)) for parts in PARTS),
        *(
            pytest.param(grid, parts, id=f"{grid}-{'+'.join(parts)}", marks=pytest.mark.long)
            for grid, parts in [*product(["tp2", "cp2"], PARTS), ("ep2", PARTS[2]), ("ep2", TOWERS)]
        ),
    ],
)
def test_frozen_parts_do_not_move_and_the_others_learn_as_ever(ranks, reference, grid, parts):
    """Bitwise; they have no state of the optimizer, and what learns has the gradient it had."""
    pool = open_grid(ranks, reference, grid, frozen=parts)
    states, learning = assert_frozen(reference, pool, lambda name: part_of(name) in parts)
    if grid == "one":
        assert states == [learning]


def test_parts_that_are_not_there_or_all_of_them_are_refused(reference):
    shape = read_architecture(reference.folder)
    for parts, of, message in (
        (["language", *FROZEN], shape, "nothing would learn"),
        (["audio"], replace(shape, audio=None), "has only language, vision, vision_projection; re"),
        (["audio"], replace(shape, audio=None, vision=None), "has no parts; remove audio"),
    ):
        actor = job(reference.folder, actor={"frozen": parts}).actor
        with pytest.raises(ConfigError, match=message):
            fit.check_frozen(actor.frozen, of, actor.layout)
    actor = job(reference.folder, actor={"frozen": list(FROZEN)}).actor
    assert check_model(reference.folder, actor) == shape


def test_the_operations_of_hearing_by_hand(reference):
    """Bins 128, channels 8, hidden 48, inner 80, 2 layers, out 64; windows of 26 tokens."""
    shape = read_architecture(reference.folder).audio
    convolved = 9 * 8 * 64 * 50 + 9 * 64 * 32 * 25 + 9 * 64 * 16 * 13
    weights = 2 * (4 * 48 * 48 + 2 * 48 * 80) + 8 * 16 * 48 + 48 * (48 + 64)
    pairs = 26 * 26 + 4 * 4
    expected = 6 * (weights + convolved / 13) * 30 + 12 * 2 * 48 * pairs
    assert hearing_flops(shape, [30]) == pytest.approx(expected)
    assert hearing_flops(shape, [30, 30]) == pytest.approx(2 * expected)
