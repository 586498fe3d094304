"""Tokens go to the experts that a record says, as in a Hugging Face forward with forced routes."""

import megatron_worker as worker
import numpy as np
import pytest
from megatron_reference import (
    clear_gradient,
    collect,
    force_routes,
    mixture,
    reference,
    replayed,
)
from megatron_worker import job, trajectories

pytestmark = pytest.mark.long

LAYERS, DENSE, EXPERTS, PER_TOKEN = 4, 1, 8, 3
LAYOUTS = {
    "1": (1, {}),
    "tp2": (2, {"tp": 2}),
    "ep2": (2, {"dp": 2, "layout": {"expert_parallel": 2}}),
    "pp2": (2, {"layout": {"pipeline_parallel": 2}}),
    "pp2_vpp2": (2, {"layout": {"pipeline_parallel": 2, "virtual_pipeline": 2}}),
    "cp2": (2, {"layout": {"context_parallel": 2}}),
    "tp2_cp2_ep4": (
        4,
        {"tp": 2, "layout": {"context_parallel": 2, "expert_parallel": 4}},
    ),
}
RECOMPUTE = {
    "full": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    },
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}  # fmt: skip


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
    return found


def opened(ranks, forced, layout, **more):
    size, options = LAYOUTS[layout]
    options = dict(options) | {"optimizer": {"weight_decay": 0.1}} | more
    ranks[size].call(worker.open_trainer, config=job(forced.folder, **options))
    return ranks[size]


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_gradient_and_update_are_those_of_forced_routes(ranks, forced, layout):
    pool = opened(ranks, forced, layout)
    found = collect(pool.call(worker.logprobs, rows=forced.rows))
    for ours, theirs in zip(found, forced.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    train = {"rows": forced.rows, "advantages": forced.advantages}
    gradient = pool.call(worker.gradients, **train)[0]
    for name, theirs in forced.gradients[0].items():
        np.testing.assert_allclose(gradient[name], theirs, atol=1e-5, err_msg=name)
    routers = [g for name, g in gradient.items() if name.endswith("mlp.gate.weight")]
    assert len(routers) == LAYERS - 1
    assert all(np.abs(gradient).max() > 1e-4 for gradient in routers)
    pool = opened(ranks, forced, layout)
    metrics = pool.call(worker.train, **train)[0]
    assert metrics["grad_norm"] == pytest.approx(forced.norms[0], rel=1e-5)
    assert (metrics["routing/differs"], metrics["routing/missing"]) == pytest.approx(
        expected_shares(forced)
    )
    weights = pool.call(worker.weights)[0]
    for name, theirs in forced.steps[0].items():
        clear = clear_gradient(forced, name)
        np.testing.assert_allclose(weights[name][clear], theirs[clear], atol=1e-5, err_msg=name)


def test_without_a_record_the_router_chooses_and_logprobs_are_others(ranks, forced):
    bare = [row._replace(routed_experts=None) for row in forced.rows]
    found = collect(opened(ranks, forced, "1").call(worker.logprobs, rows=bare))
    gaps = [np.abs(a - b).max() for a, b in zip(found, forced.logprobs, strict=True)]
    assert gaps[3] < 1e-5  # it never had one
    assert min(gaps[:3] + gaps[7:]) > 0.01


@pytest.mark.parametrize("transformer", RECOMPUTE.values(), ids=RECOMPUTE)
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_what_is_computed_again_goes_the_same_way(ranks, forced, transformer, layout):
    train = {"rows": forced.rows, "advantages": forced.advantages}
    plain = opened(ranks, forced, layout).call(worker.gradients, **train)[0]
    pool = opened(ranks, forced, layout, transformer=transformer)
    again = pool.call(worker.gradients, **train)[0]
    assert all(np.array_equal(again[name], gradient) for name, gradient in plain.items())


def test_the_split_into_portions_and_micro_batches_changes_nothing(ranks, forced):
    train = {"rows": forced.rows, "advantages": forced.advantages}
    one = opened(ranks, forced, "1", budget=400).call(worker.train, **train)[0]
    pool = opened(ranks, forced, "1", budget=25)
    many = pool.call(worker.train, num_portions=3, **train)[0]
    for name in ("grad_norm", "loss", "logprob_gap/mean", "routing/differs", "routing/missing"):
        assert many[name] == pytest.approx(one[name], rel=1e-5), name


@pytest.mark.parametrize("layout", ["1", "ep2", "pp2_vpp2"])
def test_the_gap_to_the_sampler_is_measured_with_and_without_replay(ranks, forced, layout):
    sampled = [
        row.with_columns(rollout_logprobs=np.where(row.loss_mask, logprobs, 0).astype(np.float32))
        for row, logprobs in zip(forced.rows, forced.logprobs, strict=True)
    ]
    pool = opened(ranks, forced, layout, budget=400)
    metrics = pool.call(worker.train, rows=sampled, advantages=forced.advantages)[0]
    assert metrics["logprob_gap/max"] < 1e-5
    assert metrics["routing/gap"] < 1e-6
    assert metrics["routing/gap_without"] > 0.05
    metrics = pool.call(worker.train, rows=sampled, advantages=forced.advantages)[0]
    assert "routing/gap_without" not in metrics  # a forward pass, not in every step


def test_a_record_of_another_model_is_refused(ranks, forced):
    row = forced.rows[0]._replace(routed_experts=forced.rows[0].routed_experts[:, PER_TOKEN:])
    pool = opened(ranks, forced, "1")
    with pytest.raises(AssertionError, match=r"of trajectory 0/0: .* in 4 layers with 3 experts"):
        pool.call(worker.logprobs, rows=[row])
