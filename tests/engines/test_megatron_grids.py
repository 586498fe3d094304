"""Every way to share model and batch gives what Hugging Face gives."""

import megatron_worker as worker
import numpy as np
import pytest
from megatron_reference import clear_gradient, collect, dense
from megatron_reference import reference as hugging_face
from megatron_worker import job

pytestmark = pytest.mark.long

GRIDS = {
    "tp2": (2, {"tensor_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "pp2_vpp2": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "cp2": (2, {"context_parallel": 2}),
    "tp4": (4, {"tensor_parallel": 4}),  # on two key-value heads
    "tp2_pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "tp2_cp2": (4, {"tensor_parallel": 2, "context_parallel": 2}),
    "pp2_dp2": (4, {"pipeline_parallel": 2, "data_parallel": 2}),
    "cp2_dp2": (4, {"context_parallel": 2, "data_parallel": 2}),
}


@pytest.fixture(scope="module", params=["untied", "tied"])
def reference(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return hugging_face(folder, dense(folder, tied=request.param == "tied", layers=4))


def open_grid(ranks, reference, grid, **more):
    size, layout = GRIDS[grid]
    pool = ranks[size]
    config = job(reference.folder, layout=layout, optimizer={"weight_decay": 0.1}, **more)
    pool.call(worker.open_trainer, config=config)
    return pool


def check(found, expected, tolerance=1e-5):
    assert set(found) == set(expected)
    for name, theirs in expected.items():
        assert np.abs(found[name] - theirs).max() < tolerance, name


@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_equals_hugging_face(ranks, reference, grid):
    """Logprobs, loss, gradients, and the weights after two updates with torch's AdamW."""
    pool = open_grid(ranks, reference, grid)
    batch = {"rows": reference.rows, "advantages": reference.advantages}
    logprobs = collect(pool.call(worker.logprobs, rows=reference.rows))
    for mine, theirs in zip(logprobs, reference.logprobs, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    for gradients in pool.call(worker.gradients, **batch):
        check(gradients, reference.gradients[0])
    pool = open_grid(ranks, reference, grid)
    for step in range(2):
        metrics = pool.call(worker.train, **batch)
        assert all(rank == metrics[0] for rank in metrics)
        assert metrics[0]["loss"] == pytest.approx(reference.losses[step], abs=1e-5)
        assert metrics[0]["grad_norm"] == pytest.approx(reference.norms[step], rel=1e-5)
        for weights in pool.call(worker.weights):
            for name, theirs in reference.steps[step].items():
                clear = clear_gradient(reference, name) & clear_gradient(reference, name, step)
                assert np.abs(weights[name] - theirs)[clear].max() < 1e-5, (name, step)


@pytest.mark.parametrize("grid", ["pp2", "pp2_vpp2", "cp2", "pp2_dp2"])
def test_micro_batches_and_portions_change_nothing(ranks, reference, grid):
    found = []
    for budget, num_portions in ((20, 1), (100_000, 1), (40, 3)):
        pool = open_grid(ranks, reference, grid, budget=budget)
        batch = {"rows": reference.rows, "advantages": reference.advantages}
        metrics = pool.call(worker.train, **batch, num_portions=num_portions)[0]
        found.append(metrics)
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5, abs=1e-6)


def test_epochs_compare_with_the_policy_before_the_step_on_every_stage(ranks, reference):
    found = []
    for grid in ("tp2", "pp2", "cp2"):
        pool = open_grid(ranks, reference, grid, algorithm={"epochs_per_step": 2}, budget=30)
        batch = {"rows": reference.rows, "advantages": reference.advantages}
        found.append(pool.call(worker.train, **batch)[0])
    assert abs(found[0]["ratio"] - 1) > 1e-4
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4, abs=1e-6)
