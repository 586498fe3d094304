"""Advantages of tokens are made where rows are read, alike in any split of the batch."""

import numpy as np
import pytest
from discounted import GAMMA
from trainers import opened, trajectories


def test_discounted_returns_train_alike_in_any_split_and_as_worked_by_hand(ranks, folder):
    """The reward of a token is the logprob that it was sampled with."""
    rows, _ = trajectories(12)
    total = count = 0
    for row in rows:
        worth = 0.0
        for trained, reward in zip(
            row.loss_mask[::-1], row.columns["rollout_logprobs"][::-1], strict=True
        ):
            worth = GAMMA * worth + (float(reward) if trained else 0.0)
            total, count = total + worth * bool(trained), count + int(trained)
    unused = np.full(len(rows), np.nan, np.float32)
    batch = {"rows": rows, "advantages": unused, "loss": "discounted"}
    found = [
        opened(ranks, folder, grid, budget=budget).train(**batch, num_portions=portions)[0]
        for grid, budget, portions in (
            ("one", 1000, 1),
            ("one", 20, 3),
            ("dp2", 50, 2),
            ("cp2", 50, 1),
        )
    ]
    for metrics in found:
        assert metrics["loss"] == pytest.approx(-total / count, rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(found[0]["grad_norm"], rel=1e-4)
