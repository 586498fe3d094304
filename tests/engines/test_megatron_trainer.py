"""The trainer against Hugging Face, and against itself in other layouts."""

import numpy as np
import pytest
import torch
import trainers
from hf_logprobs import hf_logprobs
from megatron_reference import dense
from megatron_reference import reference as hugging_face


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    made = {}
    for tied in (False, True):
        folder = tmp_path_factory.mktemp("tied" if tied else "untied")
        made[tied] = (folder, dense(folder, tied=tied))
    return made


@pytest.fixture(scope="module")
def reference(qwen3):
    return hugging_face(*qwen3[False])


@pytest.fixture(scope="module", params=["untied", "tied"])
def deeper(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return hugging_face(folder, dense(folder, tied=request.param == "tied", layers=4))


DECAYS = {"optimizer": {"weight_decay": 0.1}}
SMALL = ["one", "tp2", "dp2"]
DEEP = [
    "tp2", "pp2", "pp2_vpp2", "cp2", "tp2_pp2", "tp2_cp2", "pp2_dp2", "cp2_dp2",
    "tp4",  # on two key-value heads
]  # fmt: skip


@pytest.mark.parametrize("grid", SMALL)
def test_logprobs_gradient_and_two_adamw_steps_are_hugging_faces(ranks, reference, grid):
    trainers.assert_a_grid_equals(
        reference, lambda: trainers.opened(ranks, reference.folder, grid, **DECAYS)
    )


@pytest.mark.long
@pytest.mark.parametrize("grid", DEEP)
def test_so_they_are_of_a_deeper_model_on_every_grid(ranks, deeper, grid):
    trainers.assert_a_grid_equals(
        deeper, lambda: trainers.opened(ranks, deeper.folder, grid, **DECAYS)
    )


def test_tied_embeddings_and_temperature_equal_hugging_faces(ranks, qwen3):
    folder, model = qwen3[True]
    rows, _ = trainers.trajectories(4, seed=5)
    with torch.no_grad():
        theirs = [hf_logprobs(model, row.token_ids, temperature=0.7) for row in rows]
    for grid in ("one", "tp2"):
        pool = trainers.opened(ranks, folder, grid, temperature=0.7)
        trainers.assert_close(trainers.collect(pool.logprobs(rows=rows)), theirs)


def test_every_step_trains_at_its_own_rate(ranks, reference):
    """Adam's first step is as long as the rate wherever the gradient is clear."""
    optimizer = {"lr": 1e-3, "warmup_steps": 4}
    pool = trainers.opened(ranks, reference.folder, "one", optimizer=optimizer)
    name = "model.layers.0.mlp.up_proj.weight"
    before = pool.weights()[0][name]
    rates = [pool.train(**reference.batch)[0]["lr"]]
    step = np.abs(pool.weights()[0][name] - before)[trainers.clear_gradient(reference, name)]
    assert np.median(step) == pytest.approx(2.5e-4, rel=1e-2)
    rates += [pool.train(**reference.batch)[0]["lr"] for _ in range(2)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4])


@pytest.mark.parametrize("grid", ["tp2", "dp2"])
def test_a_clipped_step_equals_torchs_however_it_is_split(ranks, qwen3, reference, grid):
    """Adam's epsilon is large, so that the step shows the gradient's scale."""
    folder, model = qwen3[False]
    clip, options = reference.norms[0] / 4, {"lr": 1.0, "eps": 0.1, "betas": (0.9, 0.95)}
    theirs = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in theirs.items():
        parameter.grad = torch.from_numpy(reference.gradients[0][name].copy())
    assert torch.nn.utils.clip_grad_norm_(theirs.values(), clip) == pytest.approx(4 * clip)
    torch.optim.AdamW(theirs.values(), **options, weight_decay=0.0).step()
    optimizer = {"lr": 1.0, "clip_grad": clip, "megatron": {"adam_eps": 0.1}}
    for budget in (20, 100_000):
        pool = trainers.opened(ranks, folder, grid, budget=budget, optimizer=optimizer)
        metrics = pool.train(**reference.batch)[0]
        assert metrics["grad_norm"] == pytest.approx(reference.norms[0], rel=1e-5)
        trainers.assert_close(pool.weights()[0], theirs)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("grid", SMALL)
def test_any_split_into_micro_batches_and_portions_gives_one_update(ranks, reference, grid, epochs):
    """5 portions of 12 rows: with 2 ranks some have a micro-batch that the other has not."""
    found = []
    for budget, num_portions in ((100_000, 1), (50, 1), (20, 1), (20, 3), (20, 5)):
        options = {"budget": budget, "algorithm": {"epochs_per_step": epochs}}
        pool = trainers.opened(ranks, reference.folder, grid, **options)
        metrics = pool.train(**reference.batch, num_portions=num_portions)
        assert all(rank == metrics[0] for rank in metrics)
        found.append((metrics[0], pool.weights()[0]))
    (metrics, weights), *others = found
    if epochs == 1:
        assert metrics["grad_norm"] == pytest.approx(reference.norms[0], rel=1e-5)
    for other_metrics, other in others:
        assert other_metrics == pytest.approx(metrics, rel=10.0 ** (epochs - 6), abs=1e-6)
        trainers.assert_updated(other, weights, reference)


@pytest.mark.parametrize("grid", ["tp2", "dp2"])
def test_what_is_lent_between_two_steps_changes_nothing(ranks, reference, grid):
    weights = []
    for lends in (False, True):
        pool = trainers.opened(ranks, reference.folder, grid)
        pool.train(**reference.batch)
        if lends:
            before, meanwhile, after = pool.lend()[0]
            assert (before, meanwhile) == (after, 0)
            assert before > 0
        pool.train(**reference.batch)
        weights.append(pool.weights()[0])
    assert trainers.equal(weights[0], weights[1])


def test_garbage_under_the_mask_is_inert(ranks, reference):
    logprobs, weights = [row.columns["rollout_logprobs"] for row in reference.rows], []
    for garbage in (0.0, float("nan"), float("inf")):
        rows = [
            row.with_columns(rollout_logprobs=np.where(row.loss_mask, each, garbage).astype("f4"))
            for row, each in zip(reference.rows, logprobs, strict=True)
        ]
        pool = trainers.opened(ranks, reference.folder, "one")
        metrics = pool.train(rows=rows, advantages=reference.advantages)[0]
        assert all(np.isfinite(value) for value in metrics.values())
        weights.append(pool.weights()[0])
    assert trainers.equal(weights[1], weights[0]) and trainers.equal(weights[2], weights[0])


def test_the_gap_is_between_the_trainer_and_the_sampler(ranks, reference):
    rows = []
    for row, logprobs in zip(reference.rows, reference.logprobs, strict=True):
        rows.append(row.with_columns(rollout_logprobs=logprobs * (row.loss_mask != 0)))
    index = int(np.flatnonzero(rows[4].loss_mask)[0])
    rows[4].columns["rollout_logprobs"][index] += 0.5
    pool = trainers.opened(ranks, reference.folder, "dp2")
    metrics = pool.train(rows=rows, advantages=reference.advantages)[0]
    assert metrics["logprob_gap/max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["logprob_gap/mean"] == pytest.approx(0.5 / trainers.num_tokens(rows), abs=1e-5)


def test_later_epochs_compare_with_the_policy_before_the_step(ranks, reference):
    pool = trainers.opened(ranks, reference.folder, "one")
    assert pool.train(**reference.batch)[0]["ratio"] == pytest.approx(1.0, abs=1e-6)
    pool = trainers.opened(ranks, reference.folder, "one", algorithm={"epochs_per_step": 3})
    assert abs(pool.train(**reference.batch)[0]["ratio"] - 1.0) > 1e-4


@pytest.mark.parametrize("num_rows", [0, 12])
def test_without_a_token_to_train_on_nothing_is_updated(ranks, reference, num_rows):
    """Neither weights, which would decay, nor moments, nor Adam's count: as if it had not been."""
    rows = [row._replace(loss_mask=np.zeros_like(row.loss_mask)) for row in reference.rows]
    empty = {"rows": rows[:num_rows], "advantages": reference.advantages[:num_rows]}
    found = []
    for between in (False, True):
        pool = trainers.opened(ranks, reference.folder, "dp2", optimizer={"weight_decay": 0.5})
        pool.train(**reference.batch)
        for _ in range(4 * between):  # as many in a row as would end a run, were they not finite
            [metrics, _] = pool.train(**empty)
            assert (metrics["skipped"], metrics["grad_norm"]) == (1.0, 0.0)
            assert pool.skip() == [None, None]
        pool.train(**reference.batch)
        found.append(pool.weights()[0])
    assert trainers.equal(found[0], found[1])


def test_a_rank_without_trajectories_takes_part(ranks, reference):
    batch = {"rows": reference.rows[:1], "advantages": reference.advantages[:1]}
    alone = trainers.opened(ranks, reference.folder, "one").train(**batch)[0]
    for rank in trainers.opened(ranks, reference.folder, "dp2").train(**batch):
        assert rank == pytest.approx(alone, rel=1e-5)
