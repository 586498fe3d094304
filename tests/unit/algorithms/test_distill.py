"""What teachers teach: hand-worked numbers, expected gradients, and a second formulation."""

import math

import numpy as np
import pytest
import torch
from batches import (
    alone,
    divergence_gradient,
    expected_gradient,
    on_ranks,
    pack,
    padded,
    random_batch,
    slopes,
)

from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.composition import objective_of
from relax_hpc.algorithms.distill import Distill

PLAIN = {"loss": {"name": "policy_gradient"}}


def with_teacher(batch, **how):
    """Packed rows that a teacher has seen; its logprobs are those of the reference."""
    tokens = pack(batch, **how)
    return tokens.with_columns(teacher_logprobs=tokens.columns["ref_logprobs"])


def distilled(tokens, total=alone, **algorithm):
    """(sum, metrics, gradient) of a job's loss over packed rows."""
    objective = objective_of(algorithm_of(**{"preset": "distill"} | algorithm))
    (tokens,) = objective.prepare([tokens], total) if objective.prepare else [tokens]
    logprobs = tokens.logprobs.clone().requires_grad_()
    found = objective.loss(logprobs, tokens)
    found.loss.backward()
    return found.loss.item(), found.metrics, logprobs.grad


def test_a_token_that_the_teacher_finds_twice_as_likely_is_worth_log_2():
    tokens = with_teacher(random_batch(3))
    log = torch.full_like(tokens.logprobs, math.log(0.25))
    tokens = tokens.with_columns(
        teacher_logprobs=log + math.log(2), rollout_logprobs=log, advantages=0 * log + 0.5
    )
    found = Distill(coefficient=3.0).with_advantages(tokens).columns["advantages"]
    assert found[tokens.loss_mask] == pytest.approx(0.5 + 3 * math.log(2))
    # r = 1 and pi_T / pi = 2: k3 = 2 - 1 - log 2
    cost = Distill(name="loss").of_tokens(log, tokens)
    assert cost.loss[tokens.loss_mask] == pytest.approx(1 - math.log(2))
    assert cost.metrics["distill/kl"][tokens.loss_mask] == pytest.approx(-math.log(2))


def costs_of(name):
    """What each token costs by a part of a job with teachers."""
    part = Distill(name=name)
    if name == "loss":
        return lambda logprobs, tokens: part.of_tokens(logprobs, tokens).loss
    return lambda logprobs, tokens: -part.with_advantages(tokens).columns["advantages"] * logprobs


def test_both_have_the_gradient_of_the_reverse_divergence_if_the_policy_sampled():
    for name in ("advantage", "loss"):
        torch.testing.assert_close(
            expected_gradient(costs_of(name), "policy"), divergence_gradient()
        )


def test_under_lag_the_loss_still_has_it():
    torch.testing.assert_close(expected_gradient(costs_of("loss"), "older"), divergence_gradient())
    error = expected_gradient(costs_of("advantage"), "older") - divergence_gradient()
    assert error.norm() > 0.1 * divergence_gradient().norm()


@pytest.mark.parametrize("place", ["advantage", "loss"])
def test_it_equals_a_second_formulation_on_200_batches_mixed_with_rewards(place):
    for seed in range(200):
        batch = random_batch(seed)
        total, kl = 0.0, 0.0
        for at in zip(*np.nonzero(batch.mask), strict=True):
            names = ("logprobs", "ref_logprobs", "rollout_logprobs", "advantages")
            now, teacher, mu, worth = (float(batch.columns[name][at]) for name in names)
            if place == "advantage":
                total -= (worth + 0.3 * (teacher - mu)) * now
            else:
                likelier = math.exp(teacher) / math.exp(now)
                k3 = likelier - 1 - math.log(likelier)
                total += -worth * now + 0.3 * math.exp(now) / math.exp(mu) * k3
            kl += now - teacher
        mixed = PLAIN | {"distill": {"name": place, "coefficient": 0.3}}
        found, metrics, _ = distilled(with_teacher(batch, garbage=True), **mixed)
        assert found == pytest.approx(total, abs=1e-6)
        assert metrics["distill/kl"].item() == pytest.approx(kl, abs=1e-6)


@pytest.mark.parametrize("place", ["advantage", "loss"])
def test_garbage_is_inert_and_rows_may_come_in_any_order_and_parts(place):
    algorithm = {"distill": {"name": place}}
    for seed in range(40):
        batch = random_batch(seed)
        rows = list(range(len(batch.lengths)))
        whole = with_teacher(batch)
        expected, _, gradient = distilled(whole, **algorithm)
        _, _, dirty = distilled(with_teacher(batch, garbage=True), **algorithm)
        assert dirty.isfinite().all() and torch.equal(dirty, gradient.where(whole.loss_mask, 0.0))
        for parts in ([rows[::-1]], [[row] for row in rows]):
            found = [distilled(with_teacher(batch, rows=part), **algorithm)[0] for part in parts]
            assert sum(found) == pytest.approx(expected, abs=1e-9)


def test_the_slope_is_that_of_finite_differences():
    tokens = with_teacher(random_batch(14))
    part = Distill(name="loss")
    logprobs = tokens.logprobs.clone().requires_grad_()
    part.of_tokens(logprobs, tokens).loss.sum().backward()
    found = slopes(lambda at: part.of_tokens(at, tokens).loss.sum().item(), tokens.logprobs)
    assert logprobs.grad.tolist() == pytest.approx(found, abs=1e-6)


def test_rewards_are_whitened_without_the_teacher():
    whitened = {"advantage": {"name": "reinforce_pp"}}
    objective = objective_of(algorithm_of(preset="distill", **whitened))
    batches = [random_batch(seed) for seed in (3, 14)]

    def columns(teaches):
        rows = [with_teacher(batch) for batch in batches]
        if not teaches:
            rows = [x.with_columns(teacher_logprobs=x.columns["rollout_logprobs"]) for x in rows]
        found = on_ranks([[x] for x in rows], objective.prepare)
        return [
            padded(x, x.columns["advantages"], b) for [x], b in zip(found, batches, strict=True)
        ]

    for batch, mine, plain in zip(batches, columns(True), columns(False), strict=True):
        gap = (batch.columns["ref_logprobs"] - batch.columns["rollout_logprobs"]) * batch.mask
        np.testing.assert_allclose(mine, plain + gap, atol=1e-9)
