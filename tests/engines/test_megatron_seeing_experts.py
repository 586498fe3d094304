"""A model that sees and has experts: on every grid what Hugging Face gives, in the hub's layout."""

import pytest
from safetensors.torch import load_file, save_file
from seeing_grids import (
    assert_equal_to,
    assert_exported,
    assert_frozen,
    assert_refused,
    frozen_cases,
    long,
    seeing_part,
    seen,
)
from seen_rows import mixed_rows
from transformers import AutoModelForImageTextToText

from relax_hpc.errors import ConfigError
from relax_hpc.trainer.checkpoints import convert as conversion
from relax_hpc.trainer.models.hf_files import SINGLE

MORE_GRIDS = [
    "one, recomputed", "tp2", "pp2", "tp2_ep2", "tp2_etp2", "cp2_ep2", "pp2_dp2_ep2",
    "tp2_pp2, recomputed",
]  # fmt: skip
TOWER = ["vision", "vision_projection"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return seen(tmp_path_factory.mktemp("sees"), mixed_rows(), kind="vl-moe")


@pytest.mark.parametrize("grid", ["one", "dp2_ep2", *long(*MORE_GRIDS)])
def test_a_grid_equals_hugging_face(ranks, reference, grid):
    assert_equal_to(ranks, reference, grid)


@pytest.mark.parametrize(
    ("grid", "parts"),
    frozen_cases(
        [("one", TOWER)], ("dp2_ep2", TOWER), ("dp2_ep2", ["language"]), ("tp2_ep2", TOWER)
    ),
)
def test_frozen_parts_do_not_move_and_the_others_learn_as_ever(ranks, reference, grid, parts):
    assert_frozen(ranks, reference, grid, parts, seeing_part)


def test_an_export_is_of_the_hubs_layout_and_gives_the_same_logprobs(ranks, reference, tmp_path):
    kind = AutoModelForImageTextToText
    assert_exported(ranks, reference, reference.folder, ("dp2_ep2", "tp2"), tmp_path, kind)


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("text_config", "norm_topk_prob", False, "text_config.norm_topk_prob = False: only true"),
        ("text_config", "num_experts_per_tok", 5, "text_config.num_experts_per_tok = 5: there are"),
        ("text_config", "mlp_only_layers", [0, 1, 2, 3, 4, 5], "leave no layer with experts"),
        ("vision_config", "out_hidden_size", 48, "out_hidden_size = 48: text_config.hidden_size"),
    ],
)
def test_a_field_that_would_be_computed_otherwise_is_refused_by_name(
    reference, tmp_path, part, key, value, message
):
    assert_refused(reference.folder, tmp_path, part, key, value, message)


def test_experts_that_are_not_transposed_are_refused_by_their_shape(reference, tmp_path):
    (tmp_path / "config.json").write_bytes((reference.folder / "config.json").read_bytes())
    tensors = load_file(reference.folder / SINGLE)
    name = next(name for name in tensors if name.endswith("experts.down_proj"))
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ConfigError, match=r"down_proj is \[4, 64, 48\], but .* \[4, 48, 64\]"):
        conversion.to_megatron(tmp_path, tmp_path / "core")
