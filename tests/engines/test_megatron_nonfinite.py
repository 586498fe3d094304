"""Updates whose loss or gradient is not finite: skipped, counted, and the samples named."""

import numpy as np
import pytest
from trainers import equal, opened, trajectories


def skip_of(pool, **batch):
    """Returns what every rank says of an update that was not done."""
    metrics = pool.train(**batch)
    assert metrics[0]["skipped"] == 1.0
    said = pool.skip()
    assert said[0] == said[1]
    return said[0]


@pytest.mark.parametrize("grid", ["dp2", "cp2", "pp2", "tp2"])
def test_the_samples_are_named_whose_loss_is_not_finite(ranks, folder, grid):
    rows, advantages = trajectories(12)
    rows = [row._replace(guid=100 + row.guid // 4, sibling=row.guid % 4) for row in rows]
    pool = opened(ranks, folder, grid, budget=40)
    before = pool.weights()[0]
    broken = advantages.copy()
    broken[[5, 10]] = np.nan, np.inf
    batch = {"rows": rows, "advantages": broken, "num_portions": 2}
    skip = skip_of(pool, **batch)
    assert (skip.reason, skip.num_samples, skip.in_a_row) == ("the loss is not finite", 2, 1)
    assert sorted(sample[:2] for sample in skip.samples) == [(101, 1), (102, 2)]
    assert {sample.what for sample in skip.samples} == {"loss"}
    for sample in skip.samples:
        held = pool.micro_batches_of(rows=rows, num_portions=2)
        mine = held[sample.dp_rank if grid == "dp2" else 0][sample.micro_batch]
        assert (sample.guid, sample.sibling) in mine
    assert skip_of(pool, **batch).in_a_row == 2
    assert equal(pool.weights()[0], before)
    metrics = pool.train(rows=rows, advantages=advantages)[0]
    assert (metrics["skipped"], pool.skip()) == (0.0, [None, None])
    assert skip_of(pool, **batch).in_a_row == 1


@pytest.mark.parametrize("grid", ["dp2", "pp2"])
def test_the_samples_are_named_whose_logprobs_are_not_finite(ranks, folder, grid):
    rows, advantages = trajectories(12)
    rows = [row._replace(token_ids=row.token_ids % 100) for row in rows]
    for index in (3, 8):
        rows[index].token_ids[0] = 120
    pool = opened(ranks, folder, grid, budget=40)
    pool.break_embedding(token=120)
    skip = skip_of(pool, rows=rows, advantages=advantages)
    assert sorted((sample.guid, sample.what) for sample in skip.samples) == [
        (3, "logprobs"), (8, "logprobs"),
    ]  # fmt: skip


def test_of_many_samples_eight_are_named_from_every_rank_and_all_counted(ranks, folder):
    rows, advantages = trajectories(20)
    pool = opened(ranks, folder, "dp2", budget=40)
    skip = skip_of(pool, rows=rows, advantages=advantages, loss="exploding")
    assert (skip.reason, skip.num_samples) == ("the gradient is not finite", 20)
    assert {sample.what for sample in skip.samples} == {"gradient"}
    assert [sample.dp_rank for sample in skip.samples] == [0, 1] * 4


def test_the_second_pass_over_a_batch_names_them_too(ranks, folder):
    rows, advantages = trajectories(6)
    advantages[4] = np.nan
    pool = opened(ranks, folder, "dp2", algorithm={"epochs_per_step": 2})
    skip = skip_of(pool, rows=rows, advantages=advantages)
    assert ([sample.guid for sample in skip.samples], skip.in_a_row) == ([4], 2)


def test_a_loss_scale_that_was_too_large_counts_as_no_skip(ranks, folder):
    rows, advantages = trajectories(6)
    optimizer = {"megatron": {"initial_loss_scale": 2.0**24}}
    pool = opened(ranks, folder, "dp2", dtype="float16", actor={"optimizer": optimizer})
    assert pool.train(rows=rows, advantages=advantages)[0]["skipped"] == 1.0
    assert pool.skip() == [None, None]
