"""Every kind of algorithm trains alike however model and batch are shared out."""

import numpy as np
import pytest
from megatron_reference import mixture
from own_parts import DISCOUNTED
from trainers import collect, opened, trajectories

pytestmark = pytest.mark.long

SPLITS = [("one", 3), ("tp2", 1), ("pp2", 1), ("cp2", 1), ("dp2", 2)]
"""Grids, and portions of a batch."""
CASES = {
    "async": {"preset": "async", "loss": {"eps": 0.002}},
    "gspo": {"preset": "gspo", "loss": {"clip_low": 0.1}},
    "m2po": {"preset": "m2po"},
    "dapo": {"preset": "dapo"},
    "whitened": {"preset": "reinforce_pp_baseline"},
    "ppo": {"preset": "ppo"},
    "distill": {"preset": "distill", "loss": {"eps": 0.002}},
    "token advantages": DISCOUNTED,
    "entropy": {"entropy": {"coefficient": 0.5}},
    "decoupled": {"preset": "decoupled", "mini_batches": 2},
}
"""One after the other on the same weights, so that all but the first begin where a step ended."""
OPTIMIZER = {"lr": 0.1, "megatron": {"adam_eps": 1.0}}
"""An update that is as smooth as its gradient: at first g / (abs(g) + 1)."""


@pytest.fixture(scope="module")
def batch(ranks, folder):
    return folder, *sampled(ranks, folder)


def sampled(ranks, folder):
    made, advantages = trajectories(24)
    rows = [row._replace(guid=row.guid // 4, sibling=row.guid % 4) for row in made]
    logprobs = collect(opened(ranks, folder).logprobs(rows=rows))
    noise = np.random.default_rng(3)
    return [
        row.with_columns(
            rollout_logprobs=among(row, values + noise.normal(0, 0.3, len(values))),
            values=noise.normal(0, 1, len(values)).astype("f4"),
            teacher_logprobs=among(row, values - noise.exponential(0.5, len(values))),
        )
        for row, values in zip(rows, logprobs, strict=True)
    ], advantages


def among(row, values):
    return np.where(row.loss_mask, values, np.nan).astype("f4")


def train(ranks, folder, rows, advantages, split, cases=CASES):
    grid, num_portions = split
    pool = opened(ranks, folder, grid, budget=50, optimizer=OPTIMIZER)
    found = pool.train_algorithms(
        rows=rows, advantages=advantages, cases=list(cases.values()), num_portions=num_portions
    )
    for rank in found[1:]:
        for (metrics, _), (first, _) in zip(rank, found[0], strict=True):
            assert metrics == first
    return dict(zip(cases, found[0], strict=True))


@pytest.fixture(scope="module")
def expected(ranks, batch):
    found = train(ranks, *batch, ("one", 1))
    metrics = {case: of_case for case, (of_case, _) in found.items()}
    assert all(of_case["skipped"] == 0 for of_case in metrics.values())
    assert 0.1 < metrics["async"]["loss/masked_fraction"] < 0.9
    assert 0.2 < metrics["distill"]["distill/kl"] < 1
    assert 0.1 < metrics["m2po"]["loss/clip_fraction"] < 0.9
    return found


@pytest.mark.parametrize("split", SPLITS)
def test_loss_gradient_and_update_are_those_of_one_rank(ranks, batch, expected, split):
    agree(train(ranks, *batch, split), expected)


def test_and_with_experts_shared_out(ranks, tmp_path):
    mixture(tmp_path)
    rows, advantages = sampled(ranks, tmp_path)
    given = {"ranks": ranks, "folder": tmp_path, "rows": rows, "advantages": advantages}
    agree(train(**given, split=("dp2_ep2", 1)), train(**given, split=("one", 1)))


def agree(found, expected):
    for case, (metrics, weights) in expected.items():
        mine, others = found[case]
        assert mine.keys() == metrics.keys(), case
        for key in metrics:
            assert mine[key] == pytest.approx(metrics[key], rel=1e-5, abs=1e-5), (case, key)
        for name, theirs in weights.items():
            assert np.abs(others[name] - theirs).max() < 1e-5 * OPTIMIZER["lr"], (case, name)
