"""Tokens go to the experts that a record says, as in a Hugging Face forward with forced routes."""

import numpy as np
import pytest
from megatron_reference import force_routes, mixture, reference, replayed
from trainers import FULL, assert_a_grid_equals, equal, opened, selective, trajectories

pytestmark = pytest.mark.long

LAYERS, DENSE, EXPERTS, PER_TOKEN = 4, 1, 8, 3


def recorded(rows):
    """The rows with random experts, as if an engine had chosen them; not everywhere."""
    rng = np.random.default_rng(7)
    found = []
    for row in rows:
        size = len(row.token_ids)
        order = rng.random((size, LAYERS, EXPERTS)).argsort(-1)[..., :PER_TOKEN]
        order[-1] = -9  # nothing may read it
        found.append(row._replace(routed_experts=order.reshape(size, -1).astype(np.int16)))
    found[3] = found[3]._replace(routed_experts=None)
    found[4].routed_experts[1, :] = -1  # nobody knows
    found[5].routed_experts[0, :PER_TOKEN] = EXPERTS  # there is no such expert
    found[6].routed_experts[0, -PER_TOKEN:] = 0  # one twice is no record
    return found


RECOMPUTE = {"full": FULL, "moe": selective("moe")}


@pytest.fixture(scope="module")
def forced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replayed")
    model = mixture(
        folder, layers=LAYERS, experts=EXPERTS, per_token=PER_TOKEN, dense_layers=[DENSE]
    )
    rows = recorded(trajectories(12)[0])
    differs = force_routes(model, rows)
    found = reference(folder, model, num_steps=1)
    found.rows, found.differs = rows, {key: other.copy() for key, other in differs.items()}
    found.batch["rows"] = rows
    return found


def open_grid(ranks, forced, grid, **more):
    return opened(ranks, forced.folder, grid, optimizer={"weight_decay": 0.1}, **more)


def expected_shares(forced):
    """(part of replayed choices that differ, part of choices without record)."""
    routed = [layer for layer in range(LAYERS) if layer != DENSE]
    known = [
        (layer, place, list(replayed(row, layer, PER_TOKEN, EXPERTS)))
        for layer in routed
        for place, row in enumerate(forced.rows)
    ]
    count = sum(len(tokens) for _, _, tokens in known)
    differing = sum(forced.differs[layer, place][tokens].sum() for layer, place, tokens in known)
    # Nobody expects a record of a row's last token.
    wanted = len(routed) * sum(len(row.token_ids) - 1 for row in forced.rows)
    return differing / count, (wanted - count) / wanted


@pytest.mark.parametrize("grid", ["one", "tp2", "dp2_ep2", "pp2", "pp2_vpp2", "cp2", "tp2_cp2_ep4"])
def test_logprobs_gradient_and_update_are_those_of_forced_routes(ranks, forced, grid):
    metrics = assert_a_grid_equals(forced, lambda: open_grid(ranks, forced, grid))
    routers = [g for name, g in forced.gradients[0].items() if name.endswith("mlp.gate.weight")]
    assert len(routers) == LAYERS - 1
    assert all(np.abs(gradient).max() > 1e-4 for gradient in routers)
    shares = metrics["routing/differs"], metrics["routing/missing"]
    assert shares == pytest.approx(expected_shares(forced))


@pytest.mark.parametrize("transformer", RECOMPUTE.values(), ids=RECOMPUTE)
@pytest.mark.parametrize("grid", ["tp2", "pp2"])
def test_what_is_computed_again_goes_the_same_way(ranks, forced, transformer, grid):
    plain = open_grid(ranks, forced, grid).gradients(**forced.batch)[0]
    pool = open_grid(ranks, forced, grid, transformer=transformer)
    again = pool.gradients(**forced.batch)[0]
    assert equal(again, plain)


@pytest.mark.parametrize("grid", ["one", "dp2_ep2", "pp2_vpp2"])
def test_the_gap_to_the_sampler_is_measured_with_and_without_replay(ranks, forced, grid):
    sampled = [
        row.with_columns(rollout_logprobs=np.where(row.loss_mask, logprobs, 0).astype(np.float32))
        for row, logprobs in zip(forced.rows, forced.logprobs, strict=True)
    ]
    pool = open_grid(ranks, forced, grid, budget=400)
    metrics = pool.train(rows=sampled, advantages=forced.advantages)[0]
    assert metrics["logprob_gap/max"] < 1e-5
    assert metrics["routing/gap"] < 1e-6
    assert metrics["routing/gap_without"] > 0.05
    metrics = pool.train(rows=sampled, advantages=forced.advantages)[0]
    assert "routing/gap_without" not in metrics  # a forward pass, not in every step


def test_a_record_of_another_model_is_refused(ranks, forced):
    row = forced.rows[0]._replace(routed_experts=forced.rows[0].routed_experts[:, PER_TOKEN:])
    pool = open_grid(ranks, forced, "one")
    with pytest.raises(AssertionError, match=r"of trajectory 0/0: .* in 4 layers with 3 experts"):
        pool.logprobs(rows=[row])
