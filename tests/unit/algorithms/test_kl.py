"""The divergence from a reference, and what teachers teach: gradients, hand-worked numbers."""

import math

import numpy as np
import pytest
import torch
from batches import (
    LOGITS,
    REFERENCE,
    STALE,
    alone,
    divergence_gradient,
    expected_gradient,
    on_ranks,
    pack,
    padded,
    random_batch,
    slopes,
    tokens_of,
)

from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.composition import objective_of
from relax_hpc.algorithms.distill import Distill
from relax_hpc.algorithms.kl import Kl
from relax_hpc.algorithms.segments import rest_over

ESTIMATORS = ["k1", "k2", "k3", "rk3"]


def kl_of(name, place="reward", coefficient=1.0):
    return Kl(name=name, place=place, coefficient=coefficient)


def gradient_of(name, sampler, reference=REFERENCE):
    def costs(logprobs, tokens):
        return kl_of(name).of_tokens(logprobs, tokens).loss

    return expected_gradient(costs, sampler, reference)


def test_rk3_has_the_divergences_gradient_whoever_sampled():
    for sampler in ("policy", "older"):
        torch.testing.assert_close(gradient_of("rk3", sampler), divergence_gradient())


def test_k2_has_the_divergences_gradient_if_the_policy_sampled():
    torch.testing.assert_close(gradient_of("k2", "policy"), divergence_gradient())
    error = gradient_of("k2", "older") - divergence_gradient()
    assert error.norm() > 0.3 * divergence_gradient().norm()


def test_k3_has_the_gradient_of_the_opposite_divergence():
    torch.testing.assert_close(gradient_of("k3", "policy"), divergence_gradient(forward=True))
    for sampler in ("policy", "older"):
        error = gradient_of("k3", sampler) - divergence_gradient()
        assert error.norm() > 0.1 * divergence_gradient().norm()


def test_k1_has_no_gradient_towards_the_reference():
    torch.testing.assert_close(gradient_of("k1", "policy"), torch.zeros(4).double())
    elsewhere = gradient_of("k1", "older", STALE)
    torch.testing.assert_close(gradient_of("k1", "older"), elsewhere)


def gradient_in_the_reward(name, policy, reference):
    """As `gradient_of`, of a policy gradient whose advantage is less the divergence."""
    logits = policy.log().requires_grad_()
    logprobs = logits.log_softmax(0)
    ids = torch.arange(len(policy))  # a sequence of one token each
    columns = {
        "ref_logprobs": reference.log(), "rollout_logprobs": policy.log(),
        "old_logprobs": logprobs.detach(), "advantages": torch.zeros_like(policy),
    }  # fmt: skip
    (told,) = kl_of(name).prepare([tokens_of(columns, logprobs, ids)], alone)
    (-policy * told.columns["advantages"] * logprobs).sum().backward()
    return logits.grad


def test_in_the_reward_k1_alone_has_the_divergences_gradient():
    """Of (1/2, 1/2) from (4/5, 1/5): p1 p2 (d1 - d2) = log(1/4) / 4 = -0.3466 for the first."""
    even, uneven = torch.full((2,), 0.5).double(), torch.tensor([0.8, 0.2]).double()
    assert gradient_in_the_reward("k1", even, uneven)[0].item() == pytest.approx(-0.34657, abs=1e-5)
    # of k3 and rk3: (1.6 - 0.4 + log(1/4)) / 4
    for name in ("k3", "rk3"):
        found = gradient_in_the_reward(name, even, uneven)[0].item()
        assert found == pytest.approx(-0.04657, abs=1e-5)
    policy, expected = LOGITS.softmax(0), divergence_gradient()
    torch.testing.assert_close(gradient_in_the_reward("k1", policy, REFERENCE), expected)
    for name in ("k2", "k3", "rk3"):
        error = gradient_in_the_reward(name, policy, REFERENCE) - expected
        assert error.norm() > 0.9 * expected.norm()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_its_gradient_is_that_of_finite_differences_and_garbage_is_inert(name):
    for seed in (3, 14):
        tokens = pack(random_batch(seed), garbage=True)
        logprobs = tokens.logprobs.clone().requires_grad_()
        costs = kl_of(name).of_tokens(logprobs, tokens).loss
        assert costs.isfinite().all()
        costs.sum().backward()

        def total(at, tokens=tokens):
            return kl_of(name).of_tokens(at, tokens).loss.sum().item()

        assert logprobs.grad.tolist() == pytest.approx(slopes(total, tokens.logprobs), abs=1e-6)


@pytest.mark.parametrize(
    ("gap", "slope"), [(-2.0, -1.0), (-19.0, -9.5), (-21.0, 0.0), (19.0, 9.5), (21.0, 9.5)]
)
@pytest.mark.parametrize("part", ["kl", "distill"])
def test_however_far_the_reference_is_rk3_never_pushes_from_it(part, gap, slope):
    """r d with r = 1/2, and where d is cut off at 20, d - 1 + exp(-d) of that, or nothing."""
    logprobs = torch.tensor([-25.0], dtype=torch.float64, requires_grad=True)
    columns = {"rollout_logprobs": logprobs.detach() + math.log(2)}
    columns |= dict.fromkeys(("ref_logprobs", "teacher_logprobs"), logprobs.detach() - gap)
    tokens = tokens_of(columns, logprobs)
    term = kl_of("rk3", place="loss") if part == "kl" else Distill(name="loss")
    term.of_tokens(logprobs, tokens).loss.sum().backward()
    assert logprobs.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_in_the_reward_a_token_bears_what_it_and_those_after_it_cost(name):
    part = kl_of(name, coefficient=0.7)
    for seed in range(60):
        batch = random_batch(seed)
        kl = np.zeros(batch.mask.shape)
        tokens = pack(batch)
        kl = padded(tokens, part.of_tokens(tokens.columns["old_logprobs"], tokens).loss, batch)
        expected = np.zeros(kl.shape)
        for row, line in enumerate(batch.mask):
            for at in np.flatnonzero(line):
                rest = sum(kl[row, later] for later in range(at, len(line)))
                expected[row, at] = batch.columns["advantages"][row, at] - 0.7 * rest
        rows = list(range(len(batch.lengths)))
        for parts in ([rows], [rows[::-1]], [[row] for row in rows]):
            micro_batches = [pack(batch, part, garbage=True) for part in parts]
            prepared = part.prepare(micro_batches, alone)
            found = sum(padded(x, x.columns["advantages"], batch) for x in prepared)
            np.testing.assert_allclose(found, expected, atol=1e-9)


def test_in_the_loss_the_advantages_stay():
    (tokens,) = (pack(random_batch(1)),)
    assert Kl().prepare([tokens], alone) == [tokens]
    assert not Kl().needs().prepass
    assert kl_of("k1").needs().prepass
    assert Kl(coefficient=0).needs().columns == {}


def test_in_the_reward_it_has_no_gradient_of_its_own():
    tokens = pack(random_batch(14))

    def gradient(**kl):
        algorithm = algorithm_of(
            loss={"name": "policy_gradient"}, correction={"name": "none"}, kl=kl
        )
        objective = objective_of(algorithm, frozenset({"ref_logprobs"}))
        (prepared,) = objective.prepare([tokens], alone) if objective.prepare else [tokens]
        logprobs = tokens.logprobs.clone().requires_grad_()
        objective.loss(logprobs, prepared).loss.backward()
        return logprobs.grad

    plain = gradient(name="none")
    old = tokens.columns["old_logprobs"]
    k1 = kl_of("k1").of_tokens(old, tokens).loss
    rest = rest_over(k1, tokens.sequence_ids, tokens.loss_mask, len(tokens.groups))
    found = gradient(name="k1", place="reward", coefficient=0.3)
    torch.testing.assert_close(found, plain + 0.3 * rest.where(tokens.loss_mask, 0.0))
    assert not torch.allclose(gradient(name="rk3", coefficient=0.3), plain)


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
