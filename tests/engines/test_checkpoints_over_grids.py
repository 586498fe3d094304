"""A checkpoint of any model loads at any grid with its moments, wherever they are kept: bitwise."""

import pytest
import torch
from megatron_reference import mixture, narrow
from seeing_grids import long
from seen_rows import make, mixed_rows
from trainers import contents, equal, opened, trajectories

from relax_hpc.trainer.megatron.checkpoint_files import StoredCheckpoint

HALF, ALL = {"optimizer": {"offload": 0.5}}, {"optimizer": {"offload": 1.0}}
CHAINS = {
    "dense": [
        ("one", {}), ("tp2", HALF), ("dp2", ALL), ("pp2_vpp2", {}), ("cp2", {}), ("one", ALL),
        ("pp2", HALF),
    ],
    "untied": [("dp2", {}), ("pp2_vpp2", {}), ("tp2", {})],
    "mixture": [("dp2_ep2", {}), ("one", ALL), ("tp2_etp2", {}), ("pp2", HALF), ("dp2_ep2", ALL)],
    "vl": [("tp2", ALL), ("one", {}), ("dp2", HALF), ("pp2", {}), ("tp2", {})],
    "vl-moe": [("dp2_ep2", HALF), ("one", {}), ("pp2", ALL), ("dp2_ep2", {})],
}  # fmt: skip
"""Grids, with the place of main parameters and moments, each loading what the one before saved."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.set_num_threads(1)
    made = {kind: tmp_path_factory.mktemp(kind) for kind in CHAINS}
    narrow(made["dense"])
    narrow(made["untied"], tied=False)
    mixture(made["mixture"], experts=8, per_token=3)
    make(made["vl"])
    make(made["vl-moe"], kind="vl-moe")
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dense", "untied", "mixture", *long("vl", "vl-moe")])
def test_what_is_loaded_is_what_was_saved_at_whatever_grid_and_in_whatever_memory(
    ranks, folders, tmp_path, kind, dtype
):
    rows, advantages = mixed_rows() if kind.startswith("vl") else trajectories(8)
    expected, before = None, None
    for number, (grid, options) in enumerate(CHAINS[kind]):
        pool = opened(ranks, folders[kind], grid, budget=200, dtype=dtype, **options)
        if expected is None:
            pool.train(rows=rows, advantages=advantages, num_steps=2)
        else:
            assert pool.load(folder=before) == [2] * pool.size
        before = tmp_path / f"step{number}"
        pool.save(folder=before)
        found, updates = contents(before), StoredCheckpoint(before).common["num_updates"]
        expected = expected or found
        assert updates == 2 and equal(found, expected), (grid, options)
        assert sum(".exp_avg_sq." in key for key in found) > 10
    pool.train(rows=rows, advantages=advantages)  # it can go on
