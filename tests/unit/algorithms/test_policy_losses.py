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
    PolicyGradient(),
    PpoClip(),
    PpoClip(dual=1.5),
    Gspo(),
    Gspo(clip_low=0.2, clip_high=0.2),
    Gmpo(),
    Gmpo(clip=0.1),
    Sapo(tau_positive=1.3, tau_negative=2.0),
    Cispo(cap=1.2),
    Ipo(),
    Kpop(phi=0.02),
    Icepop(low=0.8, high=1.3),
    DppoTv(eps=0.05),
    DppoKl(eps=0.02),
    M2po(),
]
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
    PpoClip(),
    PpoClip(dual=1.5),
    M2po(),
    DppoTv(eps=0.05),
    DppoKl(eps=0.02),
    Icepop(low=0.8, high=1.3),
    Ipo(drift=0.0),
    Kpop(phi=0.02, drift=0.0),
]


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


def test_policy_gradient_by_hand():
    loss, gradient, _ = one(PolicyGradient(), now=[0.5, 0.25], then=[0.4, 0.4], worth=[2.0, -1.0])
    assert loss == near([2 * math.log(2), -math.log(4)])
    assert gradient == near([-2, 1])


def test_ppo_clip_by_hand():
    # Ratios 1.5, 0.5, 1.5, 0.5 with advantages that push on, and that pull back.
    loss, gradient, metrics = one(
        PpoClip(), now=[0.6, 0.2, 0.6, 0.2], then=[0.4] * 4, worth=[1.0, -1.0, -1.0, 1.0]
    )
    assert loss == near([-1.28, 0.8, 1.5, -0.5])
    assert gradient == near([0, 0, 1.5, -0.5])
    assert metrics["loss/clip_fraction"] == [True, True, False, False]


def test_dual_clip_by_hand():
    # Ratio 4 with a negative advantage: at most 3 times it, without gradient; a positive one is as
    # before.
    loss, gradient, metrics = one(
        PpoClip(dual=3), now=[0.8, 0.8, 0.5], then=[0.2, 0.2, 0.25], worth=[-2.0, 2.0, -2.0]
    )
    assert loss == near([6, -2.56, 4])
    assert gradient == near([0, 0, 4])
    assert metrics["loss/clip_fraction"] == [True, True, False]


def test_gspo_by_hand():
    # Ratios 2 and 0.5: their geometric mean is 1; 2 and 2: 2, clipped.
    loss, gradient, metrics = one(Gspo(), now=[0.8, 0.2], then=[0.4, 0.4], worth=[3.0, 3.0])
    assert loss == near([-3, -3])
    assert gradient == near([-3, -3])
    assert metrics["loss/clip_fraction"] == [False, False]
    loss, gradient, metrics = one(Gspo(), now=[0.8, 0.8], then=[0.4, 0.4], worth=[3.0, 3.0])
    assert loss == near([-3 * 1.0004] * 2)
    assert gradient == near([0, 0])
    assert metrics["loss/clip_fraction"] == [True, True]


def test_the_gradient_of_gspo_is_a_stop_gradients_where_each_sequence_weighs_alike():
    # verl gives each token s by a stop-gradient; the mean over a sequence weighs both alike.
    batch = random_batch(7)
    tokens = pack(batch).over("rollout")
    loss = Gspo(clip_low=0.5, clip_high=1.0)
    _, (gradient,) = sums_of(loss, [tokens])
    logprobs = tokens.logprobs.clone().requires_grad_()
    shared = loss.of_tokens(tokens.logprobs, tokens)
    ratio = -shared.loss / tokens.columns["advantages"].where(tokens.loss_mask, 1.0)
    each = ratio * (logprobs - logprobs.detach()).exp() * tokens.columns["advantages"]
    kept = tokens.loss_mask & ~shared.metrics["loss/clip_fraction"]
    (-each).where(kept, 0.0).sum().backward()
    torch.testing.assert_close(gradient, logprobs.grad)


def test_tokens_of_a_sequence_keep_what_they_are_worth():
    # Ratios 2 and 0.5 of one sequence, whose mean is 1: each token pulls by its own worth, and one
    # of no worth, or that is left out, not at all.
    loss = Gspo(clip_low=0.5, clip_high=1.0)
    _, gradient, _ = one(loss, now=[0.8, 0.2], then=[0.4, 0.4], worth=[3.0, -1.0])
    assert gradient == near([-3, 1])
    _, gradient, _ = one(loss, now=[0.8, 0.2], then=[0.4, 0.4], worth=[3.0, 0.0])
    assert gradient == near([-3, 0])
    _, gradient, _ = one(Gmpo(clip=1.0), now=[0.8, 0.2], then=[0.4, 0.4], worth=[3.0, -1.0])
    assert gradient == near([-3, 1])


def test_gmpo_by_hand():
    # log r = log 2, held at 0.4, and log 0.5, which is in the other direction and stays.
    loss, gradient, metrics = one(Gmpo(), now=[0.8, 0.2], then=[0.4, 0.4], worth=[2.0, 2.0])
    mean = (0.4 - math.log(2)) / 2
    assert loss == near([-2 * math.exp(mean)] * 2)
    assert gradient == near([0, -2 * math.exp(mean)])
    assert metrics["loss/clip_fraction"] == [True, False]
    # What is worth nothing is not held, however far it went.
    _, gradient, metrics = one(Gmpo(), now=[0.8, 0.1], then=[0.1, 0.8], worth=[0.0, 0.0])
    assert gradient == near([0, 0]) and not any(metrics["loss/clip_fraction"])


def test_sapo_by_hand():
    loss, gradient, _ = one(Sapo(), now=[0.4, 0.8], then=[0.4, 0.4], worth=[1.0, -1.0])
    gate = 1 / (1 + math.exp(-1.05))
    assert loss == near([-2, 4 / 1.05 * gate])
    assert gradient == near([-1, 4 * gate * (1 - gate) * 2])


def test_cispo_by_hand():
    # Ratios 8, capped at 5, and 0.5: both teach.
    loss, gradient, metrics = one(Cispo(), now=[0.8, 0.2], then=[0.1, 0.4], worth=[1.0, -1.0])
    assert loss == near([-5 * math.log(0.8), 0.5 * math.log(0.2)])
    assert gradient == near([-5, 0.5])
    assert metrics["loss/clip_fraction"] == [True, False]


def test_ipo_by_hand():
    # Moved by 0.05 and by 0.2: the second has the drift's gradient alone.
    loss, gradient, metrics = one(
        Ipo(drift=0.01), now=[0.45, 0.2], then=[0.4, 0.4], worth=[2.0, 2.0]
    )
    up, down = math.log(0.45 / 0.4), math.log(0.5)
    assert loss == near([-2.25 + 0.01 * up**2, 0.01 * down**2])
    assert gradient == near([-2.25 + 0.02 * up, 0.02 * down])
    assert metrics["loss/masked_fraction"] == [False, True]


def test_kpop_by_hand():
    # KL(0.9 | 0.6) = 0.226 and KL(0.6 | 0.9) = 0.311; of 0.5 and 0.4 both are 0.020. Of 0.02 and
    # 0.1 one is 0.053, the other 0.031: a ratio of 5 for a rare token, and yet kept.
    loss, gradient, metrics = one(
        Kpop(drift=0), now=[0.9, 0.5, 0.1], then=[0.6, 0.4, 0.02], worth=[1.0, 1.0, 1.0]
    )
    assert metrics["loss/masked_fraction"] == [True, False, False]
    assert loss == near([0, -1.25, -5])
    assert gradient == near([0, -1.25, -5])


def test_kpop_masks_by_the_larger_divergence():
    forward = 0.6 * math.log(0.6 / 0.9) + 0.4 * math.log(0.4 / 0.1)
    backward = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    assert backward < 0.25 < forward
    for now, then in (([0.9], [0.6]), ([0.6], [0.9])):
        _, _, metrics = one(Kpop(phi=0.25), now=now, then=then, worth=[1.0])
        assert metrics["loss/masked_fraction"] == [True]


def test_icepop_by_hand():
    loss, gradient, metrics = one(
        Icepop(), now=[0.6, 0.1, 0.1], then=[0.1, 0.3, 0.1], worth=[1.0, 1.0, -2.0]
    )
    assert metrics["loss/masked_fraction"] == [True, True, False]
    assert loss == near([0, 0, 2])
    assert gradient == near([0, 0, 2])


def test_dppo_tv_by_hand():
    # Up by 0.2 and down by 0.2, with advantages that push on and that pull back.
    loss, _, metrics = one(
        DppoTv(), now=[0.6, 0.6, 0.2, 0.2], then=[0.4] * 4, worth=[1.0, -1.0, -1.0, 1.0]
    )
    assert metrics["loss/masked_fraction"] == [True, False, True, False]
    assert loss == near([0, 1.5, 0, -0.5])


def test_dppo_kl_by_hand():
    # KL(0.4 | 0.6) = 0.081, KL(0.4 | 0.5) = 0.020.
    loss, _, metrics = one(
        DppoKl(), now=[0.6, 0.6, 0.5, 0.2], then=[0.4] * 4, worth=[1.0, -1.0, 1.0, -1.0]
    )
    assert metrics["loss/masked_fraction"] == [True, False, False, True]
    assert loss == near([0, 1.5, -1.25, 0])


def test_m2po_by_hand():
    # Harmful log ratios log 2 and log 1.2; tau^2 + log(1.2)^2 = 2 * 0.04.
    loss, gradient, metrics = one(
        M2po(), now=[0.8, 0.48, 0.1], then=[0.4] * 3, worth=[1.0, 1.0, 1.0]
    )
    tau = math.sqrt(0.08 - math.log(1.2) ** 2)
    assert metrics["loss/m2po_tau"] == near([tau] * 3)
    assert metrics["loss/clip_fraction"] == [True, False, False]
    assert loss == near([-math.exp(tau), -1.2, -0.25])
    assert gradient == near([0, -1.2, -0.25])


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


def test_at_lag_ipo_has_no_policy_gradient_on_exactly_the_tokens_that_moved_too_far():
    loss = Ipo()
    dropped = 0
    for seed in range(50):
        tokens = pack(random_batch(seed)).over("rollout")
        _, (gradient,) = sums_of(loss, [tokens])
        now, then, mask = tokens.logprobs, tokens.columns["rollout_logprobs"], tokens.loss_mask
        policy = gradient - (2 * loss.drift * (now - then)).where(mask, 0.0)
        _, (plain,) = sums_of(PolicyGradient(), [tokens])
        far = mask & ((now.exp() - then.exp()).abs() > loss.eps)
        dropped += int(far.sum())
        assert not policy[far].abs().gt(1e-12).any()
        ratio = (now - then).exp()
        torch.testing.assert_close(policy[mask & ~far], (ratio * plain)[mask & ~far])
    assert dropped > 50


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


def test_m2po_cannot_have_that_anchor():
    with pytest.raises(ValueError, match="rollout"):
        M2po(anchor="old")


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
