"""Mixture-of-experts layers against Hugging Face, and against themselves in other layouts."""

import numpy as np
import pytest
import torch
from megatron_reference import mixture
from megatron_reference import reference as hugging_face
from trainers import assert_a_grid_equals, assert_updated, opened

from relax_hpc.algorithms.aggregation import row_weights
from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.composition import objective_of
from relax_hpc.trainer.megatron import packing
from relax_hpc.trainer.megatron.packing import TokenDocuments


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    return hugging_face(folder, mixture(folder, experts=8, per_token=3), num_steps=1)


def open_grid(ranks, reference, grid, **more):
    more.setdefault("optimizer", {"weight_decay": 0.1})
    return opened(ranks, reference.folder, grid, **more)


ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
GRIDS = [
    "one", "dp2_ep2", "dp2", "tp2", "tp2_ep2", "tp2_etp2", "cp2_ep2", "pp2_dp2_ep2", "dp4_ep2",
    "tp2_dp2_ep2_etp2",
]  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "transformer"), [*((grid, {}) for grid in GRIDS), ("dp2_ep2", ALLGATHER)]
)
def test_logprobs_gradient_and_update_are_those_of_hugging_face(
    ranks, reference, grid, transformer
):
    assert_a_grid_equals(
        reference, lambda: open_grid(ranks, reference, grid, transformer=transformer)
    )


def trained(ranks, reference, grid, rows=None, **more):
    pool = open_grid(ranks, reference, grid, **more)
    rows = reference.rows if rows is None else rows
    train = {"rows": rows, "advantages": reference.advantages[: len(rows)]}
    return pool.train(**train)[0], pool.weights()[0]


def same(mine, theirs, reference):
    assert mine[0] == pytest.approx(theirs[0], rel=2e-5, abs=1e-6)
    assert_updated(mine[1], theirs[1], reference)


def loss_on(kind, coefficient=0.1, **more):
    return more | {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": coefficient}


def test_a_rank_with_nothing_but_padding_and_experts_without_tokens_change_nothing(
    ranks, reference
):
    rows = reference.rows[:1]  # the other rank has a micro-batch of one token, of padding
    options = loss_on("aux_loss", moe_z_loss_coeff=0.01)
    whole = trained(ranks, reference, "one", rows, transformer=options)
    for way in ({}, ALLGATHER):
        mine = trained(ranks, reference, "dp2_ep2", rows, transformer=options | way)
        same(mine, whole, reference)


def test_the_losses_of_balance_equal_a_hand_worked_case(ranks):
    # Tokens: two of document 0, two of document 1, one of padding; k = 1 of 2 experts.
    case = dict(
        logits=[[np.log(3.0), 0.0]] * 4 + [[50.0, 50.0]],
        scores=[[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6], [0.0, 1.0]],
        chosen=[[True, False]] * 3 + [[False, True]] * 2,
        documents=[0, 0, 1, 1, 2],
        trained=[2.0, 1.0, 0.0],
        experts_per_token=1,
    )
    # 3 trained tokens of weight 1, or of the weights 1/2, 1/2 and 1, so that documents weigh alike.
    for first, second in ((2.0, 1.0), (1.0, 1.0)):
        (whole, by_document, z) = ranks[1].balance(weights=[first, second, 0.0], **case)[0]
        weight = first + second
        # shares (3/4, 1/4), mean scores (0.7, 0.3): 2 x (0.525 + 0.075)
        assert whole[:2] == pytest.approx((weight * 1.2, 3.6))
        slope = [[weight * 2 * 0.75 / 4, weight * 2 * 0.25 / 4]]
        np.testing.assert_allclose(whole[2], slope * 4 + [[0, 0]], rtol=1e-6)
        # 2 x (1 x 0.85) and 2 x (0.5 x 0.55 + 0.5 x 0.45)
        assert by_document[:2] == pytest.approx((first * 1.7 + second * 1.0, 4.4))
        assert z == pytest.approx((weight * np.log(4.0) ** 2, 3 * np.log(4.0) ** 2))


def row_of(row, guid, length, trained):
    """The row with a response of `length` tokens, of which the first `trained` are trained."""
    mask = np.zeros(row.prompt_len + length, np.uint8)
    mask[row.prompt_len : row.prompt_len + trained] = 1
    ids = np.resize(row.token_ids, len(mask))
    columns = {"rollout_logprobs": -3.0 * mask.astype(np.float32)}
    return row._replace(guid=guid, token_ids=ids, loss_mask=mask, columns=columns)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", (3, 1)),
        ("sequence", (1, 1)),
        ("sequence_sum", (3, 1)),
        ("prompt", (3 / 6, 1 / 6)),
        ("constant", (3 / 8, 1 / 8)),
    ],
)
def test_a_document_weighs_in_balance_what_its_tokens_do_in_the_loss(
    reference, aggregation, expected
):
    """Two rows of a prompt: 4 tokens of which 3 are trained, 2 of which 1 is; and padding."""
    rows = [row_of(reference.rows[0], 5, *lengths) for lengths in ((4, 3), (2, 1))]
    given = row_weights(aggregation, np.array([4, 2]), np.zeros(2, np.int64), 8)
    if given is not None:
        rows = [
            row.with_columns(weights=np.float32(weight), counts=np.float32(count))
            for row, weight, count in zip(rows, *given, strict=True)
        ]
    packed = packing.build(rows, [0, 1], device=torch.device("cpu"), multiple_of=16)
    weights = objective_of(algorithm_of(aggregation=aggregation)).weights(packed)
    documents = TokenDocuments.of(packed, weights)
    assert documents.trained.tolist() == [3, 1, 0]
    assert documents.weights.tolist() == pytest.approx([*expected, 0])
    assert (documents.weights is documents.trained) == (aggregation == "token")


@pytest.mark.parametrize("grid", ["one", "pp2_dp2_ep2"])
def test_losses_of_balance_are_in_the_mean_of_the_loss(ranks, reference, grid):
    """Rows of 16 trained tokens, a prompt each, without advantage: all means but the sum's are one
    over tokens, and `constant` divides by 16, too."""
    options = {"transformer": loss_on("aux_loss", moe_z_loss_coeff=0.1), "budget": 60}
    rows = [row_of(row, guid, 16, 16) for guid, row in enumerate(reference.rows[:4])]
    found = {}
    for aggregation in ("token", "sequence", "prompt", "constant", "sequence_sum"):
        pool = open_grid(ranks, reference, grid, **options)
        keys = {"aggregation": aggregation, "loss": {"name": "ppo_clip"}, "kl": {"name": "none"}}
        told = pool.step(rows=rows, advantages=np.zeros(4, np.float32), keys=keys)[0]
        found[aggregation] = told["grad_norm"]
        assert told["loss"] == 0.0
        measured = tuple(told[f"moe/{kind}"] for kind in ("aux_loss", "z_loss"))
        assert measured == found.setdefault("measured", measured)
    assert found["token"] > 1e-3
    assert found.pop("sequence_sum") == pytest.approx(16 * found["token"], rel=1e-5)
    assert found.pop("measured")[0] > 1.0
    assert list(found.values()) == pytest.approx([found["token"]] * 4, rel=1e-5)


@pytest.mark.parametrize("kind", ["seq_aux_loss", "aux_loss", "global_aux_loss"])
def test_ranks_that_share_a_micro_batch_balance_it_as_one_would(ranks, reference, kind):
    """By document also for any other split into micro-batches."""
    beside = {} if kind == "seq_aux_loss" else {"moe_z_loss_coeff": 0.01}
    options = {"transformer": loss_on(kind, **beside)}
    expected, plain = (
        trained(ranks, reference, "one", budget=200, **more) for more in (options, {})
    )
    assert 1.0 < expected[0][f"moe/{kind}"] < 8.0
    assert 1.0 < expected[0]["moe/max_load"] <= 8 / 3
    assert expected[0]["grad_norm"] != pytest.approx(plain[0]["grad_norm"], rel=1e-3)
    assert expected[0]["loss"] == plain[0]["loss"]
    splits = [("tp2_ep2", 200), ("cp2_ep2", 200)]
    splits += [("one", 25), ("dp2_ep2", 40)] if not beside else []
    for grid, budget in splits:
        same(trained(ranks, reference, grid, budget=budget, **options), expected, reference)


def test_the_experts_bias_moves_against_their_load_in_every_update(ranks, reference):
    options = {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_bias_update_rate": 1e-5,  # too little to change what is chosen
    }
    pool = open_grid(ranks, reference, "one", transformer=options, optimizer={"lr": 1e-12})
    pool.train(**reference.batch)
    biases = np.array(pool.expert_biases()[0])
    assert biases.shape == (2, 8)
    assert {-1, 1} <= set(np.rint(biases.ravel() / 1e-5)) <= {-1, 0, 1}
    pool.train(**reference.batch)
    np.testing.assert_allclose(pool.expert_biases()[0], 2 * biases)
