"""Figures of how far the policy is from the anchor."""

import math

import pytest
from batches import pack, random_batch

from relax_hpc.algorithms import ratios


def test_the_effective_sample_of_ratios_by_hand():
    # Ratios 1, 1 and 4: 36 / 9 by 18 / 3.
    metrics = {"loss": 0.5, "loss/ratio": 2.0, "loss/ratio_squared": 6.0}
    ratios.settle(metrics)
    assert metrics == {"loss": 0.5, "loss/ratio": 2.0, "loss/effective_sample": 4 / 6}


def test_without_ratios_there_is_no_effective_sample():
    for metrics in ({"loss": 1.0}, {"loss": 1.0, "loss/ratio": 0.0, "loss/ratio_squared": 0.0}):
        ratios.settle(metrics)
        assert "loss/effective_sample" not in metrics


def test_the_distances_of_tokens_by_hand_with_garbage_under_the_mask():
    for seed in range(5):
        batch = random_batch(seed)
        tokens = pack(batch, garbage=True).over("rollout")
        found = ratios.spread(tokens.logprobs.requires_grad_(), tokens)
        assert not any(values.requires_grad for values in found.values())
        for at, place in enumerate(tokens.places):
            trained = place is not None and batch.mask[place]
            log_r = 0.0
            if trained:
                log_r = batch.columns["logprobs"][place] - batch.columns["rollout_logprobs"][place]
            ratio = math.exp(log_r)
            assert {name: values[at].item() for name, values in found.items()} == {
                "loss/approx_kl": pytest.approx(ratio - 1 - log_r),
                "loss/log_ratio_squared": pytest.approx(log_r**2),
                "loss/ratio": pytest.approx(ratio),
                "loss/ratio_squared": pytest.approx(ratio**2),
            }
