"""What is made ready before there is anything to do leaves no trace in what is done."""

import threading
import time

import megatron_worker as worker
import numpy as np
import pytest
from megatron_reference import dense, mixture
from megatron_worker import job, trajectories
from sglang_under_test import SGLANG_PYTHON

from relax_hpc.engines.process import start_engine
from relax_hpc.engines.spec import EngineSpec
from relax_hpc.errors import EngineError


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (2, {"layout": {"pipeline_parallel": 2}}),
        (2, {"dp": 2}),
        (2, {"dp": 2, "optimizer": {"ddp": {"overlap_grad_reduce": True, "bucket_size": 9000}}}),
        (2, {"layout": {"data_parallel": 2, "expert_parallel": 2}}),
    ],
)
def test_a_trainer_that_warmed_up_makes_the_same_updates(ranks, tmp_path, size, options):
    (mixture if "expert_parallel" in options.get("layout", {}) else dense)(tmp_path)
    (rows, advantages), found = trajectories(9), []
    for warm in (False, True):
        pool = ranks[size]
        pool.call(worker.open_trainer, config=job(tmp_path, **options))
        if warm:
            pool.call(worker.warm_up)
        metrics = [pool.call(worker.train, rows=rows, advantages=advantages) for _ in range(2)]
        found.append((metrics, pool.call(worker.weights)))
    (cold, before), (warm, after) = found
    assert [m["loss"] for step in cold for m in step] == [m["loss"] for step in warm for m in step]
    for mine, theirs in zip(before, after, strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_ranks_sum_gradients_before_there_is_a_step(ranks, tmp_path):
    """NCCL takes memory for that when it is first done: before engines take what is left."""
    dense(tmp_path)
    pool = ranks[2]
    pool.call(worker.open_trainer, config=job(tmp_path, dp=2))
    assert pool.call(worker.sums_of_warm_up) == [(1, 1)] * 2


def start(kind, checkpoint, folder, may_compute, **how):
    return start_engine(
        EngineSpec(kind, checkpoint, start_timeout_s=how.pop("start_timeout_s", 240)),
        host="127.0.0.1", token="t", log_path=folder / "log", may_compute=may_compute,
        python=SGLANG_PYTHON if kind == "sglang" else None, **how,
    )  # fmt: skip


def test_an_embedded_engine_is_not_begun_before_it_may_compute(checkpoints, tmp_path):
    asked = []

    def may_compute():
        asked.append((tmp_path / "log").exists())
        return len(asked) > 2

    with start("embedded", checkpoints[0], tmp_path, may_compute) as engine:
        assert engine.is_healthy()
    assert asked == [False] * 3


@pytest.mark.sglang
def test_sglang_loads_its_programs_before_it_may_compute_and_weights_after(checkpoints, tmp_path):
    lent, log = threading.Event(), tmp_path / "log"
    workers = []

    def may_compute():
        if not lent.is_set() and log.exists() and "server_args=" in log.read_text():
            workers.append(log.read_text().count("Load weight begin"))
            if len(workers) > 20:  # ten seconds, in which it could have begun
                lent.set()
        return lent.is_set()

    with start("sglang", checkpoints[0], tmp_path, may_compute) as engine:
        assert engine.is_healthy() and engine.age_s > 10
    assert set(workers) == {0} and "Load weight begin" in log.read_text()


@pytest.mark.sglang
def test_an_engine_that_is_never_lent_a_gpu_ends_when_its_host_gives_up(checkpoints, tmp_path):
    begin = time.monotonic()

    def may_compute():
        if time.monotonic() > begin + 8:
            raise RuntimeError("given up")
        return False

    with pytest.raises(RuntimeError, match="given up"):
        start("sglang", checkpoints[0], tmp_path, may_compute)


@pytest.mark.sglang
def test_time_until_gpus_are_lent_is_not_that_of_a_start(checkpoints, tmp_path):
    begin = time.monotonic()
    with pytest.raises(EngineError, match=r"start_timeout_s = 1\)"):
        start(
            "sglang", checkpoints[0], tmp_path, lambda: time.monotonic() > begin + 5,
            start_timeout_s=1,
        )  # fmt: skip
    assert time.monotonic() > begin + 6
