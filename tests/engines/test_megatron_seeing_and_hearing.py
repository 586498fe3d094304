"""A model that sees and hears: on every grid the trainer gives what Hugging Face gives."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from seeing_grids import assert_equal_to, assert_exported, assert_frozen, frozen_cases, long, seen
from seen_rows import mixed_rows_heard
from trainers import job
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from relax_hpc.errors import ConfigError
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.training.check import check_model
from relax_hpc.trainer.megatron import fit
from relax_hpc.trainer.megatron.costs import hearing_flops
from relax_hpc.trainer.models.hf_files import SINGLE
from relax_hpc.trainer.models.registry import read_architecture

GRIDS = ["one", "one, chunks of 60, in host memory", "tp2", "pp2", "dp2_ep2"]
MORE_GRIDS = [
    "one, recomputed", "dp2", "cp2", "tp2_pp2", "tp2_etp2", "dp2_etp2", "cp2_ep2",
    "cp2_ep2, recomputed", "tp2_etp2, recomputed", "tp2_ep2", "tp2_cp2", "dp2, overlapped",
]  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return seen(tmp_path_factory.mktemp("hears"), mixed_rows_heard(), 240, kind="omni")


@pytest.fixture(scope="module")
def deeper(tmp_path_factory):
    """A model of 6 layers, 3 of which take features, is too shallow for virtual stages."""
    folder = tmp_path_factory.mktemp("deeper")
    return seen(folder, mixed_rows_heard(), 240, kind="omni", deeper=True)


@pytest.mark.parametrize("grid", [*GRIDS, *long(*MORE_GRIDS)])
def test_a_grid_equals_hugging_face(ranks, reference, grid):
    assert_equal_to(ranks, reference, grid)


@pytest.mark.parametrize("grid", ["pp2_vpp2", *long("pp2_vpp2, recomputed", "tp2_pp2_vpp2")])
def test_a_grid_of_virtual_stages_equals_hugging_face(ranks, deeper, grid):
    assert read_architecture(deeper.folder).num_layers == 8
    assert_equal_to(ranks, deeper, grid)


def test_weights_go_out_as_they_came_in(ranks, reference, tmp_path):
    """Talker and code2wav with them, of another type than the thinker."""
    given = load_file(reference.folder / SINGLE)
    speaks = {name for name in given if not name.startswith("thinker.")}
    given |= {name: given[name].bfloat16() for name in speaks}
    other = make_like(reference.folder, tmp_path / "given", given)
    assert len(speaks) > 100
    Facts(other).check_weights(other)
    kind = Qwen3OmniMoeThinkerForConditionalGeneration
    assert_exported(ranks, reference, other, ("one", "tp2", "pp2", "dp2_ep2"), tmp_path, kind)
    exported = load_file(tmp_path / "hf" / SINGLE)
    assert exported.keys() == given.keys()
    assert all(torch.equal(exported[name], given[name]) for name in speaks)


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
        Facts(more).check_weights(more)
    tensors.pop("thinker.audio_tower.proj1.bias")
    less = make_like(reference.folder, tmp_path / "less", tensors)
    with pytest.raises(ConfigError, match=r"has no tensor thinker\.audio_tower\.proj1\.bias"):
        Facts(less).check_weights(less)


FROZEN = {
    "vision": "thinker.visual.", "vision_projection": "thinker.visual.merger",
    "audio": "thinker.audio_tower.", "audio_projection": "thinker.audio_tower.proj",
}  # fmt: skip


def part_of(name):
    fitting = [part for part, prefix in FROZEN.items() if name.startswith(prefix)]
    return max(fitting, key=lambda part: len(FROZEN[part]), default="language")


TOWERS = ["audio", "audio_projection", "vision", "vision_projection"]
PARTS = [["audio"], ["audio_projection"], ["language", "vision", "vision_projection"], TOWERS]


@pytest.mark.parametrize(
    ("grid", "parts"),
    frozen_cases(
        product(["one"], PARTS), *product(["tp2", "cp2"], PARTS), ("dp2_ep2", PARTS[2]),
        ("dp2_ep2", TOWERS),
    ),
)  # fmt: skip
def test_frozen_parts_do_not_move_and_the_others_learn_as_ever(ranks, reference, grid, parts):
    assert_frozen(ranks, reference, grid, parts, part_of)


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
