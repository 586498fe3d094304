"""The trainer against Hugging Face, and against itself in other layouts."""

import json

import megatron_worker as worker
import numpy as np
import pytest
import torch
from hf_logprobs import hf_logprobs
from megatron_reference import clear_gradient, collect, dense
from megatron_reference import reference as hugging_face
from megatron_worker import VOCAB, job, num_tokens, trajectories
from safetensors.torch import load_file, save_file

LAYOUTS = {
    "tp1": (1, {}),
    "tp2": (2, {"tp": 2}),
    "dp2": (2, {"dp": 2}),
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """{tied: (folder, model)}."""
    made = {}
    for tied in (False, True):
        folder = tmp_path_factory.mktemp("tied" if tied else "untied")
        made[tied] = (folder, dense(folder, tied=tied))
    return made


@pytest.fixture(scope="module")
def reference(qwen3):
    """Two updates on a fixed batch."""
    return hugging_face(*qwen3[False])


def open_layout(ranks, folder, layout, **more):
    size, options = LAYOUTS[layout]
    pool = ranks[size]
    pool.call(worker.open_trainer, config=job(folder, **(options | more)))
    return pool


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_weights_come_back_bitwise_under_their_hugging_face_names(ranks, qwen3, layout, tied):
    folder, _ = qwen3[tied]
    pool = open_layout(ranks, folder, layout)
    stored = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    for weights in pool.call(worker.weights):
        assert set(weights) == set(stored)
        for name, tensor in stored.items():
            assert np.array_equal(weights[name], tensor.numpy()), name


def test_weights_split_over_files_load_the_same(ranks, qwen3, tmp_path):
    folder, _ = qwen3[False]
    stored = load_file(folder / "model.safetensors")
    names = sorted(stored)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: stored[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (weights,) = open_layout(ranks, tmp_path, "tp1").call(worker.weights)
    assert all(np.array_equal(weights[name], stored[name].numpy()) for name in names)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_hugging_faces(ranks, reference, layout):
    pool = open_layout(ranks, reference.folder, layout)
    logprobs = collect(pool.call(worker.logprobs, rows=reference.rows))
    for mine, theirs in zip(logprobs, reference.logprobs, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_tied_embeddings_and_temperature_equal_hugging_faces(ranks, qwen3):
    folder, model = qwen3[True]
    rows, _ = trajectories(4, seed=5)
    for layout in ("tp1", "tp2"):
        pool = open_layout(ranks, folder, layout, temperature=0.7)
        for mine, row in zip(collect(pool.call(worker.logprobs, rows=rows)), rows, strict=True):
            with torch.no_grad():
                theirs = hf_logprobs(model, row.token_ids, temperature=0.7)
            np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_adamw_steps_equal_hugging_face_with_torch(ranks, reference, layout):
    pool = open_layout(ranks, reference.folder, layout, optimizer={"weight_decay": 0.1})
    for step in range(2):
        metrics = pool.call(worker.train, rows=reference.rows, advantages=reference.advantages)
        # Adam hardly sees the gradient's scale; its norm does.
        assert metrics[0]["grad_norm"] == pytest.approx(reference.norms[step], rel=1e-5)
        assert all(rank == metrics[0] for rank in metrics)
        weights = pool.call(worker.weights)[0]
        for name, theirs in reference.steps[step].items():
            clear = clear_gradient(reference, name) & clear_gradient(reference, name, step)
            difference = np.abs(weights[name] - theirs)[clear]
            assert difference.max() < 1e-5, (name, step)


def test_every_step_trains_at_its_own_rate(ranks, reference):
    """Adam's first step is as long as the rate wherever the gradient is clear."""
    optimizer = {"lr": 1e-3, "warmup_steps": 4}
    pool = open_layout(ranks, reference.folder, "tp1", optimizer=optimizer)
    batch = {"rows": reference.rows, "advantages": reference.advantages}
    name = "model.layers.0.mlp.up_proj.weight"
    before = pool.call(worker.weights)[0][name]
    rates = [pool.call(worker.train, **batch)[0]["lr"]]
    step = np.abs(pool.call(worker.weights)[0][name] - before)[clear_gradient(reference, name)]
    assert np.median(step) == pytest.approx(2.5e-4, rel=1e-2)
    rates += [pool.call(worker.train, **batch)[0]["lr"] for _ in range(2)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4])


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_a_clipped_step_equals_torchs_however_it_is_split(ranks, qwen3, reference, layout):
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
        pool = open_layout(ranks, folder, layout, budget=budget, optimizer=optimizer)
        batch = {"rows": reference.rows, "advantages": reference.advantages}
        metrics = pool.call(worker.train, **batch)[0]
        assert metrics["grad_norm"] == pytest.approx(reference.norms[0], rel=1e-5)
        mine = pool.call(worker.weights)[0]
        for name, parameter in theirs.items():
            np.testing.assert_allclose(mine[name], parameter.detach(), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("layout", ["tp1", "tp2", "dp2"])
def test_any_split_into_micro_batches_gives_one_update(ranks, reference, layout):
    results = []
    for budget in (20, 50, 100_000):
        pool = open_layout(ranks, reference.folder, layout, budget=budget)
        batch = {"rows": reference.rows, "advantages": reference.advantages}
        metrics = pool.call(worker.train, **batch)[0]
        results.append((metrics, pool.call(worker.weights)[0]))
    metrics, weights = results[-1]
    for other_metrics, other in results[:-1]:
        assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        for name in weights:
            clear = clear_gradient(reference, name)
            assert np.abs(weights[name] - other[name])[clear].max() < 1e-5, name


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("layout", ["tp1", "tp2", "dp2"])
def test_a_batch_in_portions_gives_the_update_of_the_whole(ranks, reference, layout, epochs):
    """5 portions of 12 rows: with 2 ranks some have a micro-batch that the other has not."""
    results = []
    for num_portions in (1, 3, 5):
        options = {"budget": 20, "algorithm": {"epochs_per_step": epochs}}
        pool = open_layout(ranks, reference.folder, layout, **options)
        batch = {"rows": reference.rows, "advantages": reference.advantages}
        metrics = pool.call(worker.train, **batch, num_portions=num_portions)
        assert all(rank == metrics[0] for rank in metrics)
        results.append((metrics[0], pool.call(worker.weights)[0]))
    metrics, weights = results[0]
    if epochs == 1:
        assert metrics["grad_norm"] == pytest.approx(reference.norms[0], rel=1e-5)
    for other_metrics, other in results[1:]:
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        for name in weights:
            clear = clear_gradient(reference, name)
            assert np.abs(weights[name] - other[name])[clear].max() < 1e-5, name


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_what_is_lent_between_two_steps_changes_nothing(ranks, reference, layout):
    batch = {"rows": reference.rows, "advantages": reference.advantages}
    weights = []
    for lends in (False, True):
        pool = open_layout(ranks, reference.folder, layout)
        pool.call(worker.train, **batch)
        if lends:
            before, meanwhile, after = pool.call(worker.lend)[0]
            assert (before, meanwhile) == (after, 0)
            assert before > 0
        pool.call(worker.train, **batch)
        weights.append(pool.call(worker.weights)[0])
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("num_rows", [0, 1])
def test_a_batch_with_fewer_rows_than_ranks_is_an_update_unless_it_has_none(
    ranks, reference, num_rows
):
    rows, advantages = reference.rows[:num_rows], reference.advantages[:num_rows]
    pool = open_layout(ranks, reference.folder, "dp2")
    before = pool.call(worker.weights)[0]
    metrics = pool.call(worker.train, rows=rows, advantages=advantages, num_portions=2)
    assert metrics[0] == metrics[1]
    none = num_rows == 0
    assert (metrics[0]["skipped"], metrics[0]["loss"] == 0.0) == (float(none), none)
    after = pool.call(worker.weights)[0]
    changed = any(not np.array_equal(before[name], after[name]) for name in before)
    assert changed == (num_rows > 0)


def test_documents_of_a_micro_batch_do_not_see_each_other(ranks, reference):
    pool = open_layout(ranks, reference.folder, "tp1", budget=100_000)
    rows = reference.rows
    before = collect(pool.call(worker.logprobs, rows=rows))
    changed = [row._replace(token_ids=(row.token_ids + 1) % VOCAB) for row in rows[::2]]
    mixed = list(rows)
    mixed[::2] = changed
    after = collect(pool.call(worker.logprobs, rows=mixed))
    for index in range(1, len(rows), 2):
        assert np.array_equal(before[index], after[index])
    for index in range(0, len(rows), 2):
        assert not np.allclose(before[index][1:], after[index][1:])


def test_nor_do_gradients_flow_between_them(ranks, reference):
    """Rows without a trained token must not change the update, packed or not."""
    rows, advantages = trajectories(6, seed=1)
    silent = [row._replace(loss_mask=np.zeros_like(row.loss_mask)) for row in rows[3:]]
    updates = []
    for batch in (rows[:3], rows[:3] + silent):
        pool = open_layout(ranks, reference.folder, "tp1", budget=100_000)
        metrics = pool.call(worker.train, rows=batch, advantages=advantages[: len(batch)])[0]
        updates.append((metrics["grad_norm"], metrics["loss"], metrics["entropy"]))
    assert updates[0] == pytest.approx(updates[1], rel=1e-5)


def test_garbage_under_the_mask_is_inert(ranks, reference):
    weights = []
    for garbage in (0.0, float("nan"), float("inf")):
        rows = [
            row.with_columns(
                rollout_logprobs=np.where(
                    row.loss_mask, row.columns["rollout_logprobs"], garbage
                ).astype("f4")
            )
            for row in reference.rows
        ]
        pool = open_layout(ranks, reference.folder, "tp1")
        metrics = pool.call(worker.train, rows=rows, advantages=reference.advantages)[0]
        assert all(np.isfinite(value) for value in metrics.values())
        weights.append(pool.call(worker.weights)[0])
    for other in weights[1:]:
        assert all(np.array_equal(weights[0][name], other[name]) for name in other)


def test_the_gap_is_between_the_trainer_and_the_sampler(ranks, reference):
    rows = []
    for row, logprobs in zip(reference.rows, reference.logprobs, strict=True):
        rows.append(row.with_columns(rollout_logprobs=logprobs * (row.loss_mask != 0)))
    index = int(np.flatnonzero(rows[4].loss_mask)[0])
    rows[4].columns["rollout_logprobs"][index] += 0.5
    metrics = open_layout(ranks, reference.folder, "dp2").call(
        worker.train, rows=rows, advantages=reference.advantages
    )[0]
    assert metrics["logprob_gap/max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["logprob_gap/mean"] == pytest.approx(0.5 / num_tokens(rows), abs=1e-5)


def test_later_epochs_compare_with_the_policy_before_the_step(ranks, reference):
    batch = {"rows": reference.rows, "advantages": reference.advantages}
    pool = open_layout(ranks, reference.folder, "tp1")
    assert pool.call(worker.train, **batch)[0]["ratio"] == pytest.approx(1.0, abs=1e-6)
    pool = open_layout(ranks, reference.folder, "tp1", algorithm={"epochs_per_step": 3})
    assert abs(pool.call(worker.train, **batch)[0]["ratio"] - 1.0) > 1e-4


@pytest.mark.parametrize("layout", ["tp1", "tp2", "dp2"])
def test_four_steps_equal_two_and_a_resume_and_two_bitwise(ranks, reference, tmp_path, layout):
    batch = {"rows": reference.rows, "advantages": reference.advantages, "num_steps": 2}
    options = {"optimizer": {"weight_decay": 0.1, "warmup_steps": 3, "clip_grad": 0.1}}
    pool = open_layout(ranks, reference.folder, layout, **options)
    pool.call(worker.train, **batch)
    pool.call(worker.save, folder=tmp_path / "step-2")
    metrics = pool.call(worker.train, **batch)
    straight, moments = pool.call(worker.weights), pool.call(worker.adam)

    pool = open_layout(ranks, reference.folder, layout, **options)
    assert pool.call(worker.load, folder=tmp_path / "step-2") == [2] * pool.size
    assert pool.call(worker.train, **batch) == metrics
    assert pool.call(worker.adam) == moments
    assert moments[0][0] == {4.0}
    for before, after in zip(straight, pool.call(worker.weights), strict=True):
        assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("saved", "resumed"), [("tp2", "tp1"), ("tp1", "dp2"), ("dp2", "tp2")])
def test_a_resume_at_another_layout_trains_on_alike(ranks, reference, tmp_path, saved, resumed):
    batch = {"rows": reference.rows, "advantages": reference.advantages}
    pool = open_layout(ranks, reference.folder, saved)
    pool.call(worker.train, **batch)
    pool.call(worker.save, folder=tmp_path / "step-1")
    expected_metrics = pool.call(worker.train, **batch)[0]
    expected = pool.call(worker.weights)[0]
    pool = open_layout(ranks, reference.folder, resumed)
    pool.call(worker.load, folder=tmp_path / "step-1")
    assert pool.call(worker.train, **batch)[0] == pytest.approx(
        expected_metrics, rel=1e-5, abs=1e-6
    )
    for name, weight in pool.call(worker.weights)[0].items():
        clear = clear_gradient(reference, name) & clear_gradient(reference, name, 1)
        assert np.abs(weight - expected[name])[clear].max() < 1e-5, name


@pytest.mark.parametrize("loss", ["poisoned", "exploding"])
def test_an_update_that_is_not_finite_is_skipped_and_reported(ranks, reference, loss):
    batch = {"rows": reference.rows, "advantages": reference.advantages}
    pool = open_layout(ranks, reference.folder, "dp2")
    before = pool.call(worker.weights)[0]
    assert pool.call(worker.train, **batch, loss=loss)[0]["skipped"] == 1.0
    after = pool.call(worker.weights)[0]
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert pool.call(worker.train, **batch)[0]["skipped"] == 0.0
    assert not np.array_equal(before["model.norm.weight"],
                              pool.call(worker.weights)[0]["model.norm.weight"])  # fmt: skip


@pytest.mark.parametrize("rows", ["none", "masked"])
def test_without_a_token_to_train_on_nothing_is_updated(ranks, reference, tmp_path, rows):
    """Neither weights, which would decay, nor moments, nor Adam's count: as if it had not been."""
    batch = {"rows": reference.rows, "advantages": reference.advantages}
    given = [row._replace(loss_mask=np.zeros_like(row.loss_mask)) for row in reference.rows]
    empty = {"rows": given if rows == "masked" else [], "advantages": reference.advantages}
    if rows == "none":
        empty["advantages"] = reference.advantages[:0]
    found = []
    for between in (False, True):
        pool = open_layout(ranks, reference.folder, "dp2", optimizer={"weight_decay": 0.5})
        pool.call(worker.train, **batch)
        if between:
            before = pool.call(worker.weights)[0]
            for _ in range(4):  # as many in a row as would end a run if something was not finite
                [metrics, _] = pool.call(worker.train, **empty)
                assert (metrics["skipped"], metrics["grad_norm"]) == (1.0, 0.0)
                assert pool.call(worker.skip) == [None, None]
            after = pool.call(worker.weights)[0]
            assert all(np.array_equal(before[name], after[name]) for name in before)
        pool.call(worker.train, **batch)
        found.append(pool.call(worker.weights)[0])
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])


def test_a_rank_without_trajectories_takes_part(ranks, reference):
    batch = {"rows": reference.rows[:1], "advantages": reference.advantages[:1]}
    alone = open_layout(ranks, reference.folder, "tp1").call(worker.train, **batch)[0]
    for rank in open_layout(ranks, reference.folder, "dp2").call(worker.train, **batch):
        assert rank == pytest.approx(alone, rel=1e-5)


def test_bfloat16_learns_with_float32_main_parameters(ranks, reference):
    batch = {"rows": reference.rows, "advantages": np.ones(12, np.float32), "num_steps": 8}
    pool = open_layout(ranks, reference.folder, "tp2", dtype="bfloat16", optimizer={"lr": 3e-3})
    before = np.mean([x.mean() for x in collect(pool.call(worker.logprobs, rows=reference.rows))])
    pool.call(worker.train, **batch)
    after = np.mean([x.mean() for x in collect(pool.call(worker.logprobs, rows=reference.rows))])
    assert after > before + 0.5


@pytest.mark.parametrize("size", [1, 2])
def test_split_vocabulary_gives_the_whole_ones_logprobs_and_gradient(ranks, size):
    rng = np.random.default_rng(0)
    logits = (5 * rng.normal(size=(10, VOCAB))).astype(np.float32)
    logits[3] += 200  # overflows without the maximum taken out
    targets, upstream = rng.integers(0, VOCAB, 10), rng.normal(size=10).astype(np.float32)
    whole = torch.from_numpy(logits).double().requires_grad_()
    table = (whole / 0.7).log_softmax(-1)
    expected = table.gather(1, torch.from_numpy(targets)[:, None])[:, 0]
    expected.backward(torch.from_numpy(upstream).double())
    entropy = -(table.exp() * table).sum(-1).detach()
    answers = ranks[size].call(
        worker.hidden_logprobs,
        hidden=logits, weight=np.eye(VOCAB, dtype=np.float32), targets=targets, upstream=upstream,
    )  # fmt: skip
    for logprobs, mine, gradient, _ in answers:
        np.testing.assert_allclose(logprobs, expected.detach(), atol=1e-4, rtol=1e-5)
        np.testing.assert_allclose(mine, entropy, atol=1e-4)
        np.testing.assert_allclose(gradient, whole.grad, atol=1e-4)


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_recomputing_the_mlp_gives_the_same_update_bitwise(ranks, reference, layout):
    weights = []
    for modules in ([], ["mlp"]):
        transformer = {"recompute_granularity": "selective", "recompute_modules": modules}
        pool = open_layout(ranks, reference.folder, layout, transformer=transformer)
        pool.call(worker.train, rows=reference.rows, advantages=reference.advantages)
        weights.append(pool.call(worker.weights)[0])
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
