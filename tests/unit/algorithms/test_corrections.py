"""Corrections: by hand, under masks and splits."""

import math

import numpy as np
import pytest
import torch
from batches import pack, padded, random_batch, tokens_of

from relax_hpc.algorithms.corrections.icepop import IcepopCorrection
from relax_hpc.algorithms.corrections.none import NoCorrection
from relax_hpc.algorithms.corrections.opsm import Opsm
from relax_hpc.algorithms.corrections.reject_geometric import RejectGeometric
from relax_hpc.algorithms.corrections.reject_k1 import RejectK1
from relax_hpc.algorithms.corrections.reject_k3 import RejectK3
from relax_hpc.algorithms.corrections.sequence_tis import SequenceTis
from relax_hpc.algorithms.corrections.tis import Tis

CORRECTIONS = [
    NoCorrection(), Tis(cap=1.3), SequenceTis(), IcepopCorrection(low=0.8, high=1.3),
    Opsm(delta=0.1), RejectGeometric(low=0.9, high=1.1), RejectK3(limit=0.05),
    RejectK1(low=0.8, high=1.3),
]  # fmt: skip
NAMES = lambda part: part.name  # noqa: E731


def weights_by_row(part, batch, parts):
    result = np.zeros(batch.mask.shape)
    for rows in parts:
        tokens = pack(batch, rows)
        result += padded(tokens, part.of_tokens(tokens).weights, batch)
    return result


@pytest.mark.parametrize("part", CORRECTIONS, ids=NAMES)
def test_garbage_under_the_mask_is_inert_and_weights_have_no_gradient(part):
    for seed in range(20):
        clean, dirty = (pack(random_batch(seed), garbage=waste) for waste in (False, True))
        for values in dirty.columns.values():
            values.requires_grad_()
        mask, found = clean.loss_mask, part.of_tokens(dirty)
        assert torch.equal(part.of_tokens(clean).weights[mask], found.weights[mask])
        assert found.weights.isfinite().all()
        assert not found.weights.requires_grad
        for name, metric in found.metrics.items():
            assert name.startswith("loss/importance_")
            assert metric[mask].double().isfinite().all()


@pytest.mark.parametrize("part", CORRECTIONS, ids=NAMES)
def test_neither_micro_batches_nor_the_order_of_rows_matter(part):
    for seed in range(20):
        batch = random_batch(seed)
        rows = list(range(len(batch.lengths)))
        expected = weights_by_row(part, batch, [rows])
        for parts in ([rows[::-1]], [[row] for row in rows], [rows[::2], rows[1::2]]):
            np.testing.assert_allclose(weights_by_row(part, batch, parts), expected, atol=1e-12)


def one(part, ratios, worth=1.0):
    """(weights, metrics) of the tokens of one sequence with these pi_old / mu."""
    zeros = torch.zeros(len(ratios)).double()
    columns = {
        "old_logprobs": torch.tensor(ratios, dtype=torch.float64).log() - 3,
        "rollout_logprobs": zeros - 3,
        "advantages": zeros + worth,
    }
    output = part.of_tokens(tokens_of(columns))
    return output.weights.tolist(), {key: value.tolist() for key, value in output.metrics.items()}


def near(values):
    return pytest.approx(values, abs=1e-9)


BEYOND, WITHIN = Opsm(delta=math.log(2) - 0.01), Opsm(delta=math.log(2) + 0.01)
BY_HAND = [
    (NoCorrection(), [0.1, 9.0], 1.0, [1, 1]), (Tis(), [0.5, 3.0], 1.0, [0.5, 2]),
    (SequenceTis(), [0.5, 3.0], 1.0, [1.5, 1.5]), (SequenceTis(), [2.0, 3.0], 1.0, [2, 2]),
    (IcepopCorrection(), [0.4, 0.6, 4.0, 6.0], 1.0, [0, 0.6, 4, 0]),
    # The mean of log(mu / pi_old) is (log 4 + log 1) / 2 = log 2.
    (BEYOND, [0.25, 1.0], -1.0, [0, 0]), (BEYOND, [0.25, 1.0], 1.0, [1, 1]),
    (WITHIN, [0.25, 1.0], -1.0, [1, 1]), (BEYOND, [4.0, 1.0], -1.0, [1, 1]),
    # 1.1 and 1 / 1.1 cancel out; 1.003 and 1 have a mean of 1.0015.
    (RejectGeometric(), [1.1, 1 / 1.1], 1.0, [1, 1]),
    (RejectGeometric(), [1.003, 1.0], 1.0, [0, 0]),
    (RejectGeometric(), [0.997, 1.0], 1.0, [0, 0]),
    # k3 of 1.2 is 0.2 - log 1.2 = 0.0177, halved by a token of 1: 0.0088.
    (RejectK3(), [1.2], 1.0, [0]), (RejectK3(), [1.2, 1.0], 1.0, [1, 1]),
    # verl's, of the inverse ratio, would keep 1.6 = 1 / 0.625 and reject 0.65 = 1 / 1.54.
    (RejectK1(), [0.5, 0.65, 1.3, 1.6], 1.0, [0, 1, 1, 0]),
]  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND, ids=lambda case: case[0].name)
def test_weights_by_hand(case):
    part, ratios, worth, expected = case
    assert one(part, ratios, worth)[0] == near(expected)


def test_what_is_told_by_hand():
    _, metrics = one(Tis(), [0.5, 3.0])
    assert metrics["loss/importance_mean"] == near([0.5, 2])
    assert metrics["loss/importance_capped"] == [False, True]
    _, metrics = one(IcepopCorrection(), [0.4, 0.6, 4.0, 6.0])
    assert metrics["loss/importance_rejected"] == [True, False, False, True]
