"""A model that sees and has experts: on every grid what Hugging Face gives, in the hub's layout."""

import megatron_worker
import numpy as np
import pytest
import seeing_worker as worker
import torch
from megatron_worker import job
from safetensors.torch import load_file, save_file
from seeing_grids import FULL, assert_equal_to, assert_frozen, assert_refused, long, sees_in
from seen_rows import logprobs_of, make, mixed_rows
from seen_rows import reference as hugging_face
from transformers import AutoModelForImageTextToText

from relax_hpc.checkpoints.export import save_hf
from relax_hpc.engines.megatron.checkpoint import conversion
from relax_hpc.errors import ConfigError
from relax_hpc.models.hf_files import SINGLE

GRIDS = {
    "one": (1, {}, {}),
    "ep2": (2, {"data_parallel": 2, "expert_parallel": 2}, {}),
}
MORE_GRIDS = {
    "recomputed": (1, {}, {"transformer": FULL}),
    "tp2": (2, {"tensor_parallel": 2}, {}),
    "pp2": (2, {"pipeline_parallel": 2}, {}),
    "tp2_ep2": (2, {"tensor_parallel": 2, "expert_parallel": 2}, {}),
    "tp2_etp2": (2, {"tensor_parallel": 2, "expert_tensor_parallel": 2}, {}),
    "cp2_ep2": (2, {"context_parallel": 2, "expert_parallel": 2}, {}),
    "pp2_ep2": (4, {"pipeline_parallel": 2, "data_parallel": 2, "expert_parallel": 2}, {}),
    "tp2_pp2, recomputed": (
        4, {"tensor_parallel": 2, "pipeline_parallel": 2}, {"transformer": FULL},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("sees")
    return hugging_face(folder, make(folder, kind="vl-moe"), *mixed_rows())


def open_grid(ranks, reference, grid, frozen=()):
    size, layout, options = (GRIDS | MORE_GRIDS)[grid]
    options = {"optimizer": {"weight_decay": 0.1}, "actor": {"frozen": list(frozen)}, **options}
    pool = ranks[size]
    pool.call(
        worker.open_trainer, config=job(reference.folder, layout=layout, budget=90, **options)
    )
    return pool


@pytest.mark.parametrize("grid", [*GRIDS, *long(*MORE_GRIDS)])
def test_a_grid_equals_hugging_face(ranks, reference, grid):
    assert_equal_to(reference, lambda: open_grid(ranks, reference, grid))


TOWER = ["vision", "vision_projection"]


@pytest.mark.parametrize(
    ("grid", "parts"),
    [
        ("one", TOWER),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [("ep2", TOWER), ("ep2", ["language"]), ("tp2_ep2", TOWER)]
        ),
    ],
)
def test_frozen_parts_do_not_move_and_the_others_learn_as_ever(ranks, reference, grid, parts):
    pool = open_grid(ranks, reference, grid, frozen=parts)
    assert_frozen(reference, pool, lambda name: sees_in(name, parts))


def test_an_export_is_of_the_hubs_layout_and_gives_the_same_logprobs(ranks, reference, tmp_path):
    """Bitwise what came in; after a step, transformers computes of it what the trainer does."""
    folder = reference.folder
    given = load_file(folder / SINGLE)
    for grid in ("ep2", "tp2"):
        for number, found in enumerate(open_grid(ranks, reference, grid).call(worker.weights)):
            out = tmp_path / f"{grid}-{number}"
            tensors = ((name, torch.from_numpy(tensor)) for name, tensor in found.items())
            save_hf(out, tensors, folder, write=True)
            assert_same(load_file(out / SINGLE), given)
    pool = open_grid(ranks, reference, "one")
    pool.call(worker.train, rows=reference.rows, advantages=reference.advantages)
    [trained] = pool.call(worker.logprobs, rows=reference.rows)
    pool.call(megatron_worker.save, folder=tmp_path / "step")
    conversion.to_hf(tmp_path / "step", folder, tmp_path / "hf")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf").float().eval()
    with torch.no_grad():
        for number, row in enumerate(reference.rows):
            theirs = logprobs_of(model, row, folder).numpy()
            assert np.abs(trained[number] - theirs).max() < 1e-5
            assert np.abs(trained[number] - reference.logprobs[number]).max() > 1e-3
    conversion.to_megatron(folder, tmp_path / "core")
    conversion.to_hf(tmp_path / "core", folder, tmp_path / "same")
    assert_same(load_file(tmp_path / "same" / SINGLE), given)


def assert_same(found, given):
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(found[name], tensor), name


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
