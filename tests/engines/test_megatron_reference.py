"""Weights that take turns in the trainer's model, and the reference policy made of them."""

import numpy as np
import pytest
import torch
from hf_logprobs import hf_logprobs
from megatron_reference import dense, mixture
from trainers import assert_close, collect, equal, opened, trajectories

pytestmark = pytest.mark.long

ROWS, ADVANTAGES = trajectories(12)
BATCH = {"rows": ROWS, "advantages": ADVANTAGES}

each_grid = pytest.mark.parametrize("grid", ["tp2", "dp2", "pp2", "cp2", "dp2_ep2"])


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Two policies of one shape: (folder, logprobs of ROWS by Hugging Face) each."""
    return [made(dense, seed, tmp_path_factory.mktemp("policy")) for seed in (0, 1)]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """Likewise, of 4 experts, 2 for each token."""
    return [made(mixture, seed, tmp_path_factory.mktemp("mixture")) for seed in (0, 1)]


def made(make, seed, folder):
    model = make(folder, layers=4, seed=seed)
    with torch.no_grad():
        return folder, [hf_logprobs(model, row.token_ids).numpy() for row in ROWS]


@pytest.mark.parametrize("fail", [False, True])
@each_grid
def test_swapped_weights_are_the_kept_ones_and_leave_no_trace(
    ranks, policies, mixtures, grid, fail
):
    dtype = "bfloat16" if fail else "float32"
    folder, _ = (mixtures if grid == "dp2_ep2" else policies)[0]
    pool = opened(ranks, folder, grid, dtype=dtype)
    for found in pool.swap(**BATCH, fail=fail):
        assert found["trained"]
        assert found["not swapped in"] == found["changed"] == []
        # two sets, which replicas share; context-parallel ranks are replicas, too
        size, replicas = 2 if fail else 4, 2 if grid in ("dp2", "cp2") else 1
        if grid == "dp2_ep2":  # experts have no replicas, the rest has two
            assert size < found["bytes of a weight"] < 2 * size
        else:
            assert found["bytes of a weight"] == 2 * size / replicas


@each_grid
def test_reference_logprobs_in_the_trainer_are_the_references(ranks, policies, mixtures, grid):
    (folder, own), (other, expected) = mixtures if grid == "dp2_ep2" else policies
    pool = opened(ranks, folder, grid)
    pool.open_reference(path=other)
    assert_close(collect(pool.logprobs(rows=ROWS)), own)
    for _ in range(2):
        pool.train(**BATCH)
        before = collect(pool.logprobs(rows=ROWS))
        assert_close(collect(pool.ref_logprobs(rows=ROWS)), expected)
        after = collect(pool.logprobs(rows=ROWS))
        assert equal(before, after)
        assert not any(map(np.allclose, before, expected))


def test_training_is_the_same_with_and_without_a_reference_bitwise(ranks, policies):
    found = []
    for path in (None, policies[1][0]):
        pool = opened(ranks, policies[0][0], "dp2", dtype="bfloat16")
        for _ in range(2):
            if path:
                pool.open_reference(path=path)
                pool.ref_logprobs(rows=ROWS)
            metrics = pool.train(**BATCH)
        found.append((metrics, collect(pool.logprobs(rows=ROWS))))
    assert found[0][0] == found[1][0]
    assert equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("saved", "loaded"), [("tp2", ["tp2", "pp2", "dp2"]), ("dp2_ep2", ["dp2_ep2", "tp2"])]
)
def test_a_refreshed_reference_is_the_policy_of_that_step_also_after_a_restart(
    ranks, policies, mixtures, tmp_path, saved, loaded
):
    folder, first = (mixtures if saved == "dp2_ep2" else policies)[0]
    pool = opened(ranks, folder, saved)
    pool.open_reference()
    pool.save(folder=tmp_path / "step-0")
    pool.train(**BATCH)
    pool.refresh()
    refreshed = collect(pool.logprobs(rows=ROWS))
    pool.train(**BATCH)
    trained = collect(pool.logprobs(rows=ROWS))
    found = collect(pool.ref_logprobs(rows=ROWS))
    assert equal(found, refreshed)
    pool.save(folder=tmp_path / "step-2")

    for layout in loaded:
        pool = opened(ranks, folder, layout)
        pool.open_reference()
        pool.load(folder=tmp_path / "step-0")  # has none: it is the first policy
        assert_close(collect(pool.ref_logprobs(rows=ROWS)), first)
        pool.load(folder=tmp_path / "step-2")
        for _ in range(2):
            reference = collect(pool.ref_logprobs(rows=ROWS))
            assert_close(reference, refreshed)
            own = collect(pool.logprobs(rows=ROWS))
            assert_close(own, trained)
        if layout == saved:
            assert equal(reference, refreshed)
            assert equal(own, trained)


@pytest.mark.parametrize("grid", ["tp2", "pp2", "cp2"])
def test_a_model_that_only_scores_equals_hugging_face_and_holds_no_gradients(ranks, policies, grid):
    folder, expected = policies[1]
    pool = opened(ranks, folder, grid)
    assert pool.open_scorer() == [[]] * 2
    micro_batches = [[3, 0, 7], [1, 2], [], [4, 5, 6], [8, 9, 10, 11]]
    for found in pool.scorer_logprobs(rows=ROWS, micro_batches=micro_batches):
        assert_close(found, expected)


@pytest.mark.parametrize("grid", ["tp2", "dp2", "pp2"])
def test_the_kl_term_leaves_the_reference_alone_and_pulls_others_back(ranks, policies, grid):
    pool = opened(ranks, policies[0][0], grid)
    pool.open_reference()
    at_reference = pool.train_with_kl(**BATCH, coefficient=1.0)[0]
    assert at_reference["kl/mean"] == pytest.approx(0, abs=1e-9)
    assert at_reference["grad_norm"] == pytest.approx(0, abs=1e-5)
    pool = opened(ranks, policies[0][0], grid)
    pool.open_reference(path=policies[1][0])
    kl = [pool.train_with_kl(**BATCH, coefficient=1.0)[0]["kl/mean"] for _ in range(4)]
    assert kl[0] > 0.1 and kl[3] < kl[2] < kl[1] < kl[0]
    assert pool.train_with_kl(**BATCH, coefficient=0.0)[0]["grad_norm"] == 0
