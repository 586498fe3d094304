"""Weights that take turns in the trainer's model, and the reference policy made of them."""

import pytest
import torch
from hf_logprobs import hf_logprobs
from megatron_reference import dense, mixture
from trainers import assert_close, collect, equal, opened, trajectories

pytestmark = pytest.mark.long

ROWS, ADVANTAGES = trajectories(12)
BATCH = {"rows": ROWS, "advantages": ADVANTAGES}


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Two policies of one shape: (folder, logprobs of ROWS by Hugging Face) each."""
    return [made(dense, seed, tmp_path_factory.mktemp("policy")) for seed in (0, 1)]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    return [made(mixture, seed, tmp_path_factory.mktemp("mixture")) for seed in (0, 1)]


def made(make, seed, folder):
    model = make(folder, layers=4, seed=seed)
    with torch.no_grad():
        return folder, [hf_logprobs(model, row.token_ids).numpy() for row in ROWS]


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
