"""What is made ready before there is anything to do leaves no trace in what is done."""

import pytest
from engine_fixtures import started
from megatron_reference import mixture
from trainers import equal, opened, trajectories

OVERLAPS = {"ddp": {"overlap_grad_reduce": True, "bucket_size": 9000}}


@pytest.mark.parametrize(
    ("grid", "optimizer"),
    [("one", {}), ("pp2", {}), ("dp2", {}), ("dp2", OVERLAPS), ("dp2_ep2", {})],
)
def test_a_trainer_that_warmed_up_makes_the_same_updates(ranks, folder, tmp_path, grid, optimizer):
    if grid == "dp2_ep2":
        mixture(folder := tmp_path)
    (rows, advantages), found = trajectories(9), []
    for warm in (False, True):
        pool = opened(ranks, folder, grid, optimizer=optimizer)
        if warm:
            pool.warm_up()
        metrics = [pool.train(rows=rows, advantages=advantages) for _ in range(2)]
        found.append((metrics, pool.weights()))
    (cold, before), (warm, after) = found
    assert [m["loss"] for step in cold for m in step] == [m["loss"] for step in warm for m in step]
    assert all(map(equal, after, before))


def test_ranks_sum_gradients_before_there_is_a_step(ranks, folder):
    """NCCL takes memory for that when it is first done: before engines take what is left."""
    assert opened(ranks, folder, "dp2").sums_of_warm_up() == [(1, 1)] * 2


def start(kind, checkpoint, folder, may_compute, **spec):
    how = {"may_compute": may_compute}
    return started(kind, checkpoint, folder / "log", how=how, **spec)


def test_an_embedded_engine_is_not_begun_before_it_may_compute(checkpoints, tmp_path):
    asked = []

    def may_compute():
        asked.append((tmp_path / "log").exists())
        return len(asked) > 2

    with start("embedded", checkpoints[0], tmp_path, may_compute) as engine:
        assert engine.is_healthy()
    assert asked == [False] * 3
