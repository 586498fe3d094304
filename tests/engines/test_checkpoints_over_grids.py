"""A checkpoint of any model loads at any grid with its moments, wherever they are kept: bitwise."""

import megatron_worker
import pytest
import seeing_worker
import torch
from megatron_reference import mixture, narrow
from megatron_worker import job, trajectories
from seeing_grids import long
from seen_rows import make, mixed_rows

from relax_hpc.engines.megatron.checkpoint.read import Stored

HALF, ALL = {"optimizer": {"offload": 0.5}}, {"optimizer": {"offload": 1.0}}
TP2, PP2, DP2 = ({f"{axis}_parallel": 2} for axis in ("tensor", "pipeline", "data"))
EP2 = {"data_parallel": 2, "expert_parallel": 2}
ETP2 = {"tensor_parallel": 2, "expert_tensor_parallel": 2}
VPP2 = {"pipeline_parallel": 2, "virtual_pipeline": 2}
ONE = {}
CHAINS = {
    "dense": [(ONE, {}), (TP2, HALF), (DP2, ALL), (VPP2, {}), (ONE, ALL), (PP2, HALF)],
    "mixture": [(EP2, {}), (ONE, ALL), (ETP2, {}), (PP2, HALF), (EP2, ALL)],
    "vl": [(TP2, ALL), (ONE, {}), (DP2, HALF), (PP2, {}), (TP2, {})],
    "vl-moe": [(EP2, HALF), (ONE, {}), (PP2, ALL), (EP2, {})],
}
"""Grids, with the place of main parameters and moments, each loading what the one before saved."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.set_num_threads(1)
    made = {kind: tmp_path_factory.mktemp(kind) for kind in CHAINS}
    narrow(made["dense"])
    mixture(made["mixture"], experts=8, per_token=3)
    make(made["vl"])
    make(made["vl-moe"], kind="vl-moe")
    return made


def contents(folder):
    stored = Stored(folder)
    return {key: stored.tensor(key) for key in stored.shapes()}, stored.common["num_updates"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dense", "mixture", *long("vl", "vl-moe")])
def test_what_is_loaded_is_what_was_saved_at_whatever_grid_and_in_whatever_memory(
    ranks, folders, tmp_path, kind, dtype
):
    sees = kind.startswith("vl")
    worker = seeing_worker if sees else megatron_worker
    rows, advantages = mixed_rows() if sees else trajectories(8)
    expected, before = None, None
    for number, (layout, options) in enumerate(CHAINS[kind]):
        size = layout.get("tensor_parallel", 1) * layout.get("data_parallel", 1)
        pool = ranks[size * layout.get("pipeline_parallel", 1)]
        config = job(folders[kind], layout=layout, budget=200, dtype=dtype, **options)
        pool.call(worker.open_trainer, config=config)
        if expected is None:
            pool.call(worker.train, rows=rows, advantages=advantages)
            pool.call(worker.train, rows=rows, advantages=advantages)
        else:
            assert pool.call(megatron_worker.load, folder=before) == [2] * pool.size
        before = tmp_path / f"step{number}"
        pool.call(megatron_worker.save, folder=before)
        found, updates = contents(before)
        expected = expected or found
        assert updates == 2 and found.keys() == expected.keys()
        assert sum(".exp_avg_sq." in key for key in found) > 10
        wrong = [key for key in expected if not torch.equal(found[key], expected[key])]
        assert wrong == [], (layout, options)
    pool.call(worker.train, rows=rows, advantages=advantages)  # it can go on
