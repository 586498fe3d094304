"""The critic's model on Megatron-core: values that are known, alike on every grid."""

import numpy as np
import pytest
from megatron_reference import dense
from trainers import collect, job, size_of, trajectories

from relax_hpc.schema import FinishReason, Trajectory

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{tied: folder}; a critic has the output layer of neither."""
    made = {}
    for tied in (False, True):
        made[tied] = tmp_path_factory.mktemp("tied" if tied else "untied")
        dense(made[tied], tied=tied)
    return made


def rewarded(count):
    rows, rewards = trajectories(count)
    return [row._replace(reward=float(r)) for row, r in zip(rows, rewards, strict=True)]


def open_critic(ranks, folder, grid="one", **more):
    ranks[size_of(grid)].open_critic(config=job(folder, grid, **more))
    return ranks[size_of(grid)]


@pytest.mark.parametrize("grid", ["one", "tp2", "dp2", "pp2", "cp2"])
def test_values_and_updates_are_the_same_on_every_grid(ranks, folders, grid):
    """The head begins at zero: the second step is the first that goes through the model."""
    folder = folders[grid in ("tp2", "pp2")]
    rows = rewarded(8)
    found = []
    for layout, portions in (("one", 1), (grid, 3)):
        pool = open_critic(ranks, folder, layout)
        assert not any(value.any() for value in collect(pool.logprobs(rows=rows)))
        steps = [pool.learn(rows=rows, num_portions=portions, clip=0.2)[0] for _ in range(2)]
        found.append((steps, collect(pool.logprobs(rows=rows))))
    (one, expected), (other, values) = found
    for before, after in zip(one, other, strict=True):
        for key in ("loss", "grad_norm", "value/mean", "value/square_error"):
            assert after[key] == pytest.approx(before[key], rel=2e-6, abs=1e-8), key
    for row, mine, there in zip(rows, values, expected, strict=True):
        assert mine[0] == 0 and np.abs(mine[row.prompt_len :]).max() > 0
        np.testing.assert_allclose(mine, there, rtol=0, atol=1e-6)


def chain():
    """Three ways from one state: 5 6 7 is worth 1, 5 6 8 is worth 0, 5 9 is worth 0.25."""
    ways = [([5, 6, 7], 1.0), ([5, 6, 8], 0.0), ([5, 9], 0.25), ([5, 9], 0.25)]
    return [
        Trajectory(
            guid=number, sibling=0, prompt_index=0, seed=0,
            token_ids=np.array([3, *tokens], np.int32), prompt_len=1,
            loss_mask=np.array([0] + [1] * len(tokens), np.uint8),
            version_runs=np.array([[1, 0]], np.int32), finish=FinishReason.STOP, reward=reward,
        )
        for number, (tokens, reward) in enumerate(ways)
    ]  # fmt: skip


def test_values_of_a_chain_are_learned_to_a_thousandth(ranks, tmp_path):
    """V(3) = V(3 5) = 1.5 / 4; V(3 5 6) = 0.5: the mean of what the ways from there are worth."""
    dense(tmp_path, tied=True)
    optimizer = {"lr": 3e-3, "clip_grad": 1.0, "final_lr_fraction": 0.0}
    more = {"optimizer": optimizer, "schedule": {"num_steps": 250}}
    pool = open_critic(ranks, tmp_path, **more)
    rows = chain()
    metrics = pool.learn(rows=rows, num_steps=250)[0]
    values = collect(pool.logprobs(rows=rows))
    start = 1.5 / 4
    np.testing.assert_allclose(values[0][1:], [start, start, 0.5], atol=1e-3)
    np.testing.assert_allclose(values[1][1:], [start, start, 0.5], atol=1e-3)
    np.testing.assert_allclose(values[2][1:], [start, start], atol=1e-3)
    assert metrics["value/mean"] == pytest.approx(metrics["value/return"], abs=1e-3)
