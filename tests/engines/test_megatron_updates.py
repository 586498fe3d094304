"""Several updates of a batch, a forward pass before them, and the entropy's weight."""

import numpy as np
import pytest
from trainers import assert_close, collect, equal, job, opened, trajectories

CLIPPED = {"loss": {"name": "ppo_clip"}, "correction": {"name": "none"}}
OLD = {"loss": {"name": "ppo_clip", "anchor": "old"}, "correction": {"name": "none"}}
GROUPS = 6
OPTIMIZER = {"lr": 0.1, "megatron": {"adam_eps": 1.0}}
"""An update that is as smooth as its gradient."""


@pytest.fixture(scope="module")
def rows():
    made, _ = trajectories(2 * GROUPS)
    return [row._replace(guid=row.guid // 2, sibling=row.guid % 2) for row in made]


@pytest.fixture(scope="module")
def worth():
    return trajectories(2 * GROUPS)[1]


@pytest.fixture
def one(ranks, folder):
    return opened(ranks, folder, optimizer=OPTIMIZER)


def weights_of(pool):
    return pool.weights()[0]


def step(pool, rows, worth, keys):
    return pool.step(rows=rows, advantages=worth, keys=keys)[0]


def test_mini_batches_are_updates_with_a_mean_of_their_own(one, folder, rows, worth):
    """Of groups 0 to 5 first 0 to 2, then 3 to 5: as two steps on them, but one rate and step."""
    metrics = step(one, rows, worth, CLIPPED | {"mini_batches": 2})
    mine = weights_of(one)
    one.open_trainer(config=job(folder, optimizer=OPTIMIZER))
    halves = [step(one, rows[part], worth[part], CLIPPED) for part in (slice(6), slice(6, 12))]
    assert equal(mine, weights_of(one))
    for key in ("loss", "entropy", "grad_norm"):
        assert metrics[key] == pytest.approx(np.mean([half[key] for half in halves]))


def test_they_compare_with_the_policy_before_the_first_of_them(one, folder, rows, worth):
    """As if that policy had been the sampler, and the sampler is what is compared with."""
    logprobs = collect(one.logprobs(rows=rows))
    keys = {"mini_batches": 3, "epochs_per_step": 2}
    metrics = step(one, rows, worth, OLD | keys)
    assert metrics["loss/approx_kl"] > 1e-6
    assert "time/old_logprobs" in one.costs()[0]
    mine = weights_of(one)
    sampled = [
        row.with_columns(rollout_logprobs=values)
        for row, values in zip(rows, logprobs, strict=True)
    ]
    one.open_trainer(config=job(folder, optimizer=OPTIMIZER))
    again = step(one, sampled, worth, CLIPPED | keys)
    assert again["logprob_gap/max"] < 1e-6 < metrics["logprob_gap/max"]
    assert_close(mine, weights_of(one), atol=1e-6)


def test_a_row_that_is_not_finite_costs_its_mini_batch_alone_and_is_named(one, rows, worth):
    """It is in the last of three: two updates are done."""
    broken = worth.copy()
    broken[10] = np.nan
    before = weights_of(one)
    metrics = step(one, rows, broken, OLD | {"mini_batches": 3})
    assert metrics["skipped"] == pytest.approx(1 / 3)
    skip = one.skip()[0]
    assert [sample[:2] for sample in skip.samples] == [(5, 0)]
    assert (skip.num_samples, skip.in_a_row) == (1, 1)
    assert not equal(before, weights_of(one))


def test_a_bonus_lowers_the_loss_by_the_entropy_and_raises_that(one, folder, rows, worth):
    without = step(one, rows, worth, CLIPPED)
    one.open_trainer(config=job(folder, optimizer=OPTIMIZER))
    with_bonus = step(one, rows, worth, CLIPPED | {"entropy": {"coefficient": 0.5}})
    expected = without["loss"] - 0.5 * without["entropy"]
    assert with_bonus["loss"] == pytest.approx(expected, rel=1e-5)
    assert with_bonus["loss/entropy_weight"] == 0.5
    nothing = np.zeros_like(worth)
    bonus = CLIPPED | {"entropy": {"coefficient": 1.0}}
    found = [step(one, rows, nothing, bonus)["entropy"] for _ in range(3)]
    assert found[0] < found[1] < found[2]


def test_an_adaptive_weight_goes_on_bitwise_after_a_resume(one, folder, rows, worth, tmp_path):
    """The entropy is near log 128 = 4.85, below the target: the weight rises by a step."""
    keys = CLIPPED | {"entropy": {"name": "adaptive", "target": 6.0, "step": 0.1, "largest": 0.25}}
    batch = {"rows": rows, "advantages": worth, "keys": keys, "keeps_entropy": True}

    def steps(count):
        return [one.step(**batch)[0] for _ in range(count)]

    first = steps(2)
    one.save(folder=tmp_path / "step-2")
    rest, straight = steps(3), weights_of(one)
    found = [metrics["loss/entropy_weight"] for metrics in (*first, *rest)]
    assert found == pytest.approx([0.0, 0.1, 0.2, 0.25, 0.25])
    one.open_trainer(config=job(folder, optimizer=OPTIMIZER))
    one.load(folder=tmp_path / "step-2")
    assert steps(3) == rest
    assert equal(straight, weights_of(one))
