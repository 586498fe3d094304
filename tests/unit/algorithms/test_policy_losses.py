"""Losses: by hand, by finite differences, under masks and splits."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from batches import alone, on_ranks, pack, padded, random_batch, slopes, tokens_of

from relax_hpc.algorithms.losses.cispo import Cispo
from relax_hpc.algorithms.losses.dppo_kl import DppoKl
from relax_hpc.algorithms.losses.dppo_tv import DppoTv
from relax_hpc.algorithms.losses.gmpo import Gmpo
from relax_hpc.algorithms.losses.gspo import Gspo
from relax_hpc.algorithms.losses.icepop import Icepop
from relax_hpc.algorithms.losses.ipo import Ipo
from relax_hpc.algorithms.losses.kpop import Kpop
from relax_hpc.algorithms.losses.m2po import M2po
from relax_hpc.algorithms.losses.policy_gradient import PolicyGradient
from relax_hpc.algorithms.losses.ppo_clip import PpoClip
from relax_hpc.algorithms.losses.sapo import Sapo

LOSSES = [
    PolicyGradient(), PpoClip(), PpoClip(dual=1.5), Gspo(), Gspo(clip_low=0.2, clip_high=0.2),
    Gmpo(), Gmpo(clip=0.1), Sapo(tau_positive=1.3, tau_negative=2.0), Cispo(cap=1.2), Ipo(),
    Kpop(phi=0.02), Icepop(low=0.8, high=1.3), DppoTv(eps=0.05), DppoKl(eps=0.02), M2po(),
]  # fmt: skip
BOUNDED = [loss for loss in LOSSES if not isinstance(loss, PolicyGradient | M2po)]
NAMES = lambda part: part.name  # noqa: E731


def prepared(loss, micro_batches, total=alone):
    """The micro-batches as the composition hands them to a loss."""
    micro_batches = [tokens.over(loss.anchor) for tokens in micro_batches]
    return loss.prepare(micro_batches, total) if loss.needs().prepass else micro_batches


def sums_of(loss, micro_batches, total=alone):
    """The sum over trained tokens, and its gradients, one per micro-batch."""
    result, gradients = 0.0, []
    for tokens in prepared(loss, micro_batches, total):
        logprobs = tokens.logprobs.clone().requires_grad_()
        costs = loss.of_tokens(logprobs, tokens).loss
        costs.where(tokens.loss_mask, 0.0).sum().backward()
        result += costs.detach()[tokens.loss_mask].sum().item()
        gradients.append(logprobs.grad)
    return result, gradients


def gradient_by_row(loss, batch, parts, total=alone):
    """(sum, [B, L] gradients) of rows that are spread over micro-batches."""
    micro_batches = [pack(batch, rows) for rows in parts]
    result, gradients = sums_of(loss, micro_batches, total)
    grid = sum(padded(*pair, batch) for pair in zip(micro_batches, gradients, strict=True))
    return result, grid


def share_of(loss, batch, rows, total):
    return gradient_by_row(loss, batch, [rows], total)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_the_gradient_is_that_of_finite_differences(loss):
    for seed in (3, 14, 15):
        (tokens,) = prepared(loss, [pack(random_batch(seed))])
        _, (gradient,) = sums_of(loss, [tokens])

        def total(logprobs, tokens=tokens):
            if isinstance(loss, Cispo):  # its weights have no gradient: they stand still
                r = (tokens.logprobs - tokens.columns["anchor_logprobs"]).exp().clamp(max=loss.cap)
                costs = -r * tokens.columns["advantages"] * logprobs
            else:
                costs = loss.of_tokens(logprobs, tokens).loss
            return costs.where(tokens.loss_mask, 0.0).sum().item()

        assert gradient.tolist() == pytest.approx(slopes(total, tokens.logprobs), abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_garbage_under_the_mask_is_inert(loss):
    for seed in range(20):
        clean, dirty = (pack(random_batch(seed), garbage=waste) for waste in (False, True))
        (value, (gradient,)), (same, (found,)) = (sums_of(loss, [x]) for x in (clean, dirty))
        assert value == same
        assert torch.equal(gradient, found)
        assert not found[~dirty.loss_mask].any()
        for tokens in prepared(loss, [dirty]):
            for name, metric in loss.of_tokens(tokens.logprobs, tokens).metrics.items():
                assert metric[tokens.loss_mask].double().isfinite().all(), name


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_neither_micro_batches_nor_the_order_of_rows_matter(loss):
    for seed in range(20):
        batch = random_batch(seed)
        rows = list(range(len(batch.lengths)))
        shuffled = list(np.random.default_rng(seed).permutation(rows))
        value, gradient = gradient_by_row(loss, batch, [rows])
        for parts in ([shuffled], [[row] for row in shuffled], [rows[:1], rows[1:]]):
            again, found = gradient_by_row(loss, batch, parts)
            assert again == pytest.approx(value, abs=1e-12)
            np.testing.assert_allclose(found, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_data_parallel_ranks_add_up(loss):
    for seed in range(4):
        batch = random_batch(seed)
        rows = list(range(len(batch.lengths)))
        value, gradient = gradient_by_row(loss, batch, [rows])
        shares = [rows[0::2], rows[1::2]]
        ranks = on_ranks(shares, partial(share_of, loss, batch))
        assert sum(part for part, _ in ranks) == pytest.approx(value, abs=1e-9)
        np.testing.assert_allclose(sum(grid for _, grid in ranks), gradient, rtol=0, atol=1e-9)


STOPS = [
    PpoClip(), PpoClip(dual=1.5), M2po(), DppoTv(eps=0.05), DppoKl(eps=0.02),
    Icepop(low=0.8, high=1.3), Ipo(drift=0.0), Kpop(phi=0.02, drift=0.0),
]  # fmt: skip


@pytest.mark.parametrize("loss", STOPS, ids=NAMES)
def test_what_is_counted_as_bounded_are_the_tokens_without_gradient(loss):
    seen = set()
    for seed in range(100):
        (tokens,) = prepared(loss, [pack(random_batch(seed), garbage=True)])
        logprobs = tokens.logprobs.clone().requires_grad_()
        output = loss.of_tokens(logprobs, tokens)
        output.loss.where(tokens.loss_mask, 0.0).sum().backward()
        bounded = output.metrics.get(
            "loss/masked_fraction", output.metrics.get("loss/clip_fraction")
        )
        teaches = tokens.loss_mask & (tokens.columns["advantages"] != 0)
        stands = logprobs.grad == 0
        assert bounded[teaches].tolist() == stands[teaches].tolist()
        seen |= {*stands[teaches].tolist()}
    assert seen == {False, True}


def one(loss, *, now, then, worth):
    """Loss and gradient of tokens of one sequence, of probabilities and advantages."""
    logs = [torch.tensor(values, dtype=torch.float64).log() for values in (now, then)]
    columns = {
        "advantages": torch.tensor(worth).double(),
        "rollout_logprobs": logs[1],
        "old_logprobs": logs[0] if loss.name == "m2po" else logs[1],
    }
    (tokens,) = prepared(loss, [tokens_of(columns, logs[0])])
    logprobs = logs[0].clone().requires_grad_()
    output = loss.of_tokens(logprobs, tokens)
    output.loss.sum().backward()
    metrics = {name: value.tolist() for name, value in output.metrics.items()}
    return output.loss.tolist(), logprobs.grad.tolist(), metrics


def near(values):
    return pytest.approx(values, abs=1e-9)


CLIPPED, MASKED = "loss/clip_fraction", "loss/masked_fraction"
HELD = math.exp((0.4 - math.log(2)) / 2)
GATE = 1 / (1 + math.exp(-1.05))
UP, DOWN = math.log(0.45 / 0.4), math.log(0.5)
TAU = math.sqrt(0.08 - math.log(1.2) ** 2)
WIDE = Gspo(clip_low=0.5, clip_high=1.0)
BY_HAND = [
    (PolicyGradient(), [0.5, 0.25], [0.4, 0.4], [2.0, -1.0], [2 * math.log(2), -math.log(4)],
     [-2, 1], {}),
    # Ratios 1.5, 0.5, 1.5, 0.5 with advantages that push on, and that pull back.
    (PpoClip(), [0.6, 0.2, 0.6, 0.2], [0.4] * 4, [1.0, -1.0, -1.0, 1.0], [-1.28, 0.8, 1.5, -0.5],
     [0, 0, 1.5, -0.5], {CLIPPED: [True, True, False, False]}),
    # Ratio 4 with a negative advantage: at most 3 times it, without gradient; a positive one is as
    # before.
    (PpoClip(dual=3), [0.8, 0.8, 0.5], [0.2, 0.2, 0.25], [-2.0, 2.0, -2.0], [6, -2.56, 4],
     [0, 0, 4], {CLIPPED: [True, True, False]}),
    # Ratios 2 and 0.5: their geometric mean is 1; 2 and 2: 2, clipped.
    (Gspo(), [0.8, 0.2], [0.4, 0.4], [3.0, 3.0], [-3, -3], [-3, -3], {CLIPPED: [False, False]}),
    (Gspo(), [0.8, 0.8], [0.4, 0.4], [3.0, 3.0], [-3 * 1.0004] * 2, [0, 0],
     {CLIPPED: [True, True]}),
    # Ratios 2 and 0.5 of one sequence, whose mean is 1: each token pulls by its own worth, and one
    # of no worth, or that is left out, not at all.
    (WIDE, [0.8, 0.2], [0.4, 0.4], [3.0, -1.0], None, [-3, 1], {}),
    (WIDE, [0.8, 0.2], [0.4, 0.4], [3.0, 0.0], None, [-3, 0], {}),
    (Gmpo(clip=1.0), [0.8, 0.2], [0.4, 0.4], [3.0, -1.0], None, [-3, 1], {}),
    # log r = log 2, held at 0.4, and log 0.5, which is in the other direction and stays.
    (Gmpo(), [0.8, 0.2], [0.4, 0.4], [2.0, 2.0], [-2 * HELD] * 2, [0, -2 * HELD],
     {CLIPPED: [True, False]}),
    # What is worth nothing is not held, however far it went.
    (Gmpo(), [0.8, 0.1], [0.1, 0.8], [0.0, 0.0], [0, 0], [0, 0], {CLIPPED: [False, False]}),
    (Sapo(), [0.4, 0.8], [0.4, 0.4], [1.0, -1.0], [-2, 4 / 1.05 * GATE],
     [-1, 4 * GATE * (1 - GATE) * 2], {}),
    # Ratios 8, capped at 5, and 0.5: both teach.
    (Cispo(), [0.8, 0.2], [0.1, 0.4], [1.0, -1.0], [-5 * math.log(0.8), 0.5 * math.log(0.2)],
     [-5, 0.5], {CLIPPED: [True, False]}),
    # Moved by 0.05 and by 0.2: the second has the drift's gradient alone.
    (Ipo(drift=0.01), [0.45, 0.2], [0.4, 0.4], [2.0, 2.0], [-2.25 + 0.01 * UP**2, 0.01 * DOWN**2],
     [-2.25 + 0.02 * UP, 0.02 * DOWN], {MASKED: [False, True]}),
    # KL(0.9 | 0.6) = 0.226 and KL(0.6 | 0.9) = 0.311; of 0.5 and 0.4 both are 0.020. Of 0.02 and
    # 0.1 one is 0.053, the other 0.031: a ratio of 5 for a rare token, and yet kept.
    (Kpop(drift=0), [0.9, 0.5, 0.1], [0.6, 0.4, 0.02], [1.0] * 3, [0, -1.25, -5], [0, -1.25, -5],
     {MASKED: [True, False, False]}),
    (Kpop(phi=0.25), [0.9], [0.6], [1.0], None, None, {MASKED: [True]}),  # by the larger one
    (Kpop(phi=0.25), [0.6], [0.9], [1.0], None, None, {MASKED: [True]}),
    (Icepop(), [0.6, 0.1, 0.1], [0.1, 0.3, 0.1], [1.0, 1.0, -2.0], [0, 0, 2], [0, 0, 2],
     {MASKED: [True, True, False]}),
    # Up by 0.2 and down by 0.2, with advantages that push on and that pull back.
    (DppoTv(), [0.6, 0.6, 0.2, 0.2], [0.4] * 4, [1.0, -1.0, -1.0, 1.0], [0, 1.5, 0, -0.5], None,
     {MASKED: [True, False, True, False]}),
    # KL(0.4 | 0.6) = 0.081, KL(0.4 | 0.5) = 0.020.
    (DppoKl(), [0.6, 0.6, 0.5, 0.2], [0.4] * 4, [1.0, -1.0, 1.0, -1.0], [0, 1.5, -1.25, 0], None,
     {MASKED: [True, False, False, True]}),
    # Harmful log ratios log 2 and log 1.2; tau^2 + log(1.2)^2 = 2 * 0.04.
    (M2po(), [0.8, 0.48, 0.1], [0.4] * 3, [1.0] * 3, [-math.exp(TAU), -1.2, -0.25],
     [0, -1.2, -0.25], {CLIPPED: [True, False, False], "loss/m2po_tau": near([TAU] * 3)}),
]  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND, ids=lambda case: case[0].name)
def test_losses_and_gradients_by_hand(case):
    loss, now, then, worth, costs, slopes_, told = case
    found, gradient, metrics = one(loss, now=now, then=then, worth=worth)
    assert costs is None or found == near(costs)
    assert slopes_ is None or gradient == near(slopes_)
    assert {name: metrics[name] for name in told} == told


def m2po_tau_by_sorting(budget, mask, columns):
    """The first k squares are let through whole, all others at tau."""
    log_r = columns["old_logprobs"] - columns["rollout_logprobs"]
    harmful = mask & (columns["advantages"] * log_r > 0)
    squares = sorted((log_r[harmful] ** 2).tolist())
    target, below = budget * len(squares), 0.0
    for k, square in enumerate(squares):
        if below + square * (len(squares) - k) > target:
            return math.sqrt((target - below) / (len(squares) - k))
        below += square
    return math.inf


@pytest.mark.parametrize("budget", [1e-4, 0.01, 0.04, 0.3])
def test_the_threshold_of_m2po_is_that_of_sorting_whatever_the_micro_batches(budget):
    loss = M2po(budget=budget)
    for seed in range(40):
        batch = random_batch(seed)
        expected = min(m2po_tau_by_sorting(budget, batch.mask, batch.columns), 20)
        parts = [pack(batch, [row]) for row in range(len(batch.lengths))]
        for tokens in prepared(loss, parts):
            assert tokens.columns["m2po_tau"].tolist() == near([expected] * len(tokens.loss_mask))


@pytest.mark.parametrize("loss", BOUNDED, ids=NAMES)
def test_with_anchor_old_and_one_epoch_every_bound_is_inert(loss):
    """The trap: the old policy is the one that is trained, the ratio 1, and nothing is bounded."""
    loss = type(loss).model_validate({**loss.model_dump(), "anchor": "old"})
    assert loss.has_trust_region
    for seed in range(20):
        tokens = pack(random_batch(seed))
        tokens = tokens.with_columns(old_logprobs=tokens.logprobs)
        _, (gradient,) = sums_of(loss, [tokens])
        _, (plain,) = sums_of(PolicyGradient(), [tokens])
        torch.testing.assert_close(gradient, plain)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_a_ratio_beyond_all_bounds_is_finite(loss):
    for now, then in ((-1e-3, -1e4), (-1e4, -1e-3)):
        for worth in (1.0, -1.0):
            tokens = pack(random_batch(0), [0], padding=0)
            ones = torch.ones_like(tokens.logprobs)
            columns = {"rollout_logprobs": then * ones, "old_logprobs": now * ones}
            tokens = tokens.with_columns(advantages=worth * ones, **columns)
            (tokens,) = prepared(loss, [tokens])
            logprobs = (now * ones).requires_grad_()
            loss.of_tokens(logprobs, tokens).loss.sum().backward()
            assert logprobs.grad.isfinite().all()
