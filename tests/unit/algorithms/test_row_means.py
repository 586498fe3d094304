"""The mean over rows: each weighs alike, whatever of it is not trained on, and wherever it is."""

import numpy as np
import pytest
import torch
from batches import pack, random_batch
from batches import tokens_of as packed

from relax_hpc.algorithms.aggregation import row_weights
from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.composition import objective_of

PRESETS = ["grpo", "sapo", "gspo", "gmpo"]


def sums_of(preset, tokens):
    """(loss, denominator, gradient by token) of a micro-batch with the weights of its rows."""
    algorithm = algorithm_of(preset=preset)
    groups = tokens.groups.clamp(min=0).numpy()
    lengths = tokens.sequence_ids.bincount(minlength=len(groups)).numpy()
    weighed = row_weights(algorithm.aggregation, lengths, groups, 16)._asdict()
    columns = {name: torch.tensor(rows)[tokens.sequence_ids] for name, rows in weighed.items()}
    logprobs = tokens.logprobs.clone().requires_grad_()
    loss, _, count = objective_of(algorithm).loss(logprobs, tokens.with_columns(**columns))
    loss.backward()
    return loss.item(), count.item(), logprobs.grad


def tokens_of(mask, worth):
    """Rows of these masks, with ratios of 1, and `worth` on all tokens of each."""
    ids = torch.tensor([row for row, line in enumerate(mask) for _ in line])
    same = torch.full((len(ids),), -1.0, dtype=torch.float64)
    advantages = torch.tensor(worth, dtype=torch.float64)[ids]
    columns = {"rollout_logprobs": same, "old_logprobs": same, "advantages": advantages}
    flat = torch.tensor([trained == 1 for line in mask for trained in line])
    return packed(columns, same, ids, flat)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_tool_said_does_not_make_a_row_weigh_less(preset):
    """Two trained tokens of 2, and of 20: a half for each row, in the second three times as much.

    By all tokens the second row's would be 2 / 20 of that, 0.075 each.
    """
    tokens = tokens_of([[1, 1], [1, *[0] * 18, 1]], [1.0, 3.0])
    loss, count, gradient = sums_of(preset, tokens)
    assert loss == pytest.approx(-8 if preset == "sapo" else -4) and count == 2
    assert (gradient / count)[[0, 1, 2, 21]].tolist() == pytest.approx([-0.25, -0.25, -0.75, -0.75])
    assert not gradient[3:21].any()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_row_without_a_trained_token_is_no_row_of_the_mean(preset):
    """The same gradient with it as without: a half for each of the others."""
    loss, count, gradient = sums_of(preset, tokens_of([[1], [0, 0, 0], [1, 0, 1]], [1.0, 9.0, 3.0]))
    assert np.isfinite(loss) and count == 2
    assert (gradient / count).tolist() == pytest.approx([-0.5, 0, 0, 0, -0.75, 0, -0.75])
    loss, count, gradient = sums_of(preset, tokens_of([[0, 0]], [1.0]))
    assert (loss, count) == (0, 0) and not gradient.any()


@pytest.mark.parametrize("preset", PRESETS)
def test_micro_batches_order_and_garbage_do_not_matter(preset):
    for seed in range(60):
        batch = random_batch(seed)
        rows = list(range(len(batch.lengths)))
        loss, count, gradient = sums_of(preset, pack(batch))
        whole = dict(zip(pack(batch).places, gradient.tolist(), strict=True))
        for parts in ([rows[::-1]], [[row] for row in rows], [rows[::2], rows[1::2]]):
            micro_batches = [pack(batch, part, garbage=True) for part in parts if part]
            found = [sums_of(preset, tokens) for tokens in micro_batches]
            assert sum(each[0] for each in found) == pytest.approx(loss, abs=1e-9)
            assert sum(each[1] for each in found) == pytest.approx(count)
            for tokens, (*_, gradient) in zip(micro_batches, found, strict=True):
                for place, value in zip(tokens.places, gradient.tolist(), strict=True):
                    assert place is None or value == pytest.approx(whole[place], abs=1e-9)
