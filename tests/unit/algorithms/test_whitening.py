"""REINFORCE++'s advantages over the tokens of a batch, however it is dealt."""

import statistics
from functools import partial

import numpy as np
import pytest
import torch
from batches import GARBAGE, alone, on_ranks, pack, padded, random_batch, tokens_of

from relax_hpc.algorithms.advantages.gae import Gae
from relax_hpc.algorithms.advantages.reinforce_pp import ReinforcePp
from relax_hpc.algorithms.advantages.reinforce_pp_baseline import ReinforcePpBaseline

PARTS = [ReinforcePp(), ReinforcePpBaseline(), Gae(whiten=True)]
NAMES = lambda part: part.name  # noqa: E731


def whitened(part, batch, parts, total=alone):
    """[B, L] advantages of rows that are spread over micro-batches."""
    micro_batches = part.prepare([pack(batch, rows) for rows in parts], total)
    return sum(padded(tokens, tokens.columns["advantages"], batch) for tokens in micro_batches)


def share_of(part, batch, rows, total):
    return whitened(part, batch, [rows], total)


def test_by_hand():
    # Tokens of 1, 1 and -1; the fourth is masked: mean 1/3, variance 4/3.
    mask = torch.tensor([True, True, True, False])
    worth = torch.tensor([1.0, 1.0, -1.0, float("inf")])
    (after,) = ReinforcePp().prepare([tokens_of({"advantages": worth}, mask=mask)], alone)
    scale = (4 / 3) ** 0.5
    expected = [2 / 3 / scale, 2 / 3 / scale, -4 / 3 / scale, 0]
    assert after.columns["advantages"].tolist() == pytest.approx(expected)
    assert after.columns["advantages"].dtype == torch.float32


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_it_equals_a_second_formulation_on_200_batches(part):
    for seed in range(200):
        batch = random_batch(seed)
        rows = range(len(batch.lengths))
        worth = batch.columns["advantages"]
        trained = worth[batch.mask].tolist()
        expected = np.zeros(batch.mask.shape)
        if trained:
            variance = statistics.variance(trained) if len(trained) > 1 else 0.0
            mean = statistics.fmean(trained)
            expected[batch.mask] = [(x - mean) / (variance + 1e-8) ** 0.5 for x in trained]
        np.testing.assert_allclose(whitened(part, batch, [rows]), expected, atol=1e-6)


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_micro_batches_order_and_ranks_do_not_matter(part):
    for seed in range(10):
        batch = random_batch(seed)
        rows = list(range(len(batch.lengths)))
        expected = whitened(part, batch, [rows])
        np.testing.assert_allclose(whitened(part, batch, [[row] for row in rows[::-1]]), expected)
        shares = [rows[0::2], rows[1::2]]
        ranks = on_ranks(shares, partial(share_of, part, batch))
        np.testing.assert_allclose(sum(ranks), expected, atol=1e-12)


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
@pytest.mark.parametrize("waste", GARBAGE)
def test_garbage_under_the_mask_is_inert(part, waste):
    batch = random_batch(5)
    (clean,) = part.prepare([pack(batch)], alone)
    tokens = pack(batch)
    dirty = tokens.columns["advantages"].masked_fill(~tokens.loss_mask, waste)
    (found,) = part.prepare([tokens.with_columns(advantages=dirty)], alone)
    assert torch.equal(found.columns["advantages"], clean.columns["advantages"])
