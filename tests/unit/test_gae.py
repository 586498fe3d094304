"""Advantages of values, and the critic's loss: on chains whose numbers are worked by hand."""

import math
from typing import NamedTuple

import pytest
import torch

from relax_hpc.algorithms.estimates import generalized
from relax_hpc.algorithms.value_loss import value_loss


class Packed(NamedTuple):
    loss_mask: torch.Tensor
    sequence_ids: torch.Tensor
    groups: torch.Tensor
    columns: dict

    @classmethod
    def of(cls, masks, **columns):
        ids = [torch.full((len(mask),), number) for number, mask in enumerate(masks)]
        return cls(
            torch.tensor([bit for mask in masks for bit in mask]) != 0,
            torch.cat(ids),
            torch.zeros(len(masks), dtype=torch.int64),
            {name: torch.tensor(values) for name, values in columns.items()},
        )


def by_loops(values, rewards, masks, gamma, lam, alpha=0.0):
    """The same, backwards over every sequence, a token at a time."""
    found, at = [], 0
    for mask in masks:
        decay = max(0.0, 1 - 1 / (alpha * sum(mask))) if alpha and sum(mask) else lam
        out = [0.0] * len(mask)
        advantage = value = to_come = 0.0
        for t in reversed(range(len(mask))):
            if not mask[t]:
                continue
            reward = float(rewards[at + t]) - to_come
            delta = reward + gamma * value - float(values[at + t])
            advantage = out[t] = delta + gamma * decay * advantage
            value, to_come = float(values[at + t]), float(rewards[at + t])
        found += out
        at += len(mask)
    return torch.tensor(found, dtype=torch.float64)


def test_a_chain_of_three_with_a_tools_token_between_is_worth_what_it_is_by_hand():
    """V = 0.2, 0.5, 0.6 and reward 1: with gamma 0.9 and lam 0.8 the deltas are
    0.45 - 0.2 = 0.25, 0.54 - 0.5 = 0.04, 1 - 0.6 = 0.4, and 0.72 goes from one to the one before.
    """
    tokens = Packed.of([[0, 1, 1, 0, 0, 1]])
    values = torch.tensor([9.0, 0.2, 0.5, math.nan, -7.0, 0.6])
    found = generalized(values, torch.full((6,), 1.0), tokens, gamma=0.9, lam=0.8)
    third = 0.4
    second = 0.04 + 0.72 * third
    first = 0.25 + 0.72 * second
    assert found.tolist() == pytest.approx([0, first, second, 0, 0, third], abs=1e-6)
    assert first == pytest.approx(0.48616)


def test_lambda_follows_the_length_of_a_response():
    """alpha 0.05 and 40 tokens make it a half; 20 tokens or fewer make it 0."""
    long, short = [1] * 40, [1] * 10
    tokens = Packed.of([long, short])
    values = torch.linspace(0, 1, 50)
    rewards = torch.ones(50)
    found = generalized(values, rewards, tokens, gamma=1.0, lam=1.0, alpha=0.05)
    half = generalized(values, rewards, tokens, gamma=1.0, lam=0.5)
    none = generalized(values, rewards, tokens, gamma=1.0, lam=0.0)
    assert torch.allclose(found[:40], half[:40]) and torch.allclose(found[40:], none[40:])
    assert not torch.allclose(half[:40], none[:40])


def test_random_batches_equal_a_loop_over_tokens():
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        masks = [
            (torch.rand(int(n), generator=generator) < 0.7).int().tolist()
            for n in torch.randint(1, 9, (5,), generator=generator)
        ]
        tokens = Packed.of(masks)
        count = len(tokens.loss_mask)
        values, rewards = torch.randn(2, count, generator=generator, dtype=torch.float64)
        gamma, lam = torch.rand(2, generator=generator).tolist()
        for alpha in (0.0, 0.5):
            found = generalized(values, rewards, tokens, gamma=gamma, lam=lam, alpha=alpha)
            expected = by_loops(values, rewards, masks, gamma, lam, alpha)
            assert torch.allclose(found, expected, atol=1e-9)


def test_what_is_to_come_may_fall_on_the_way():
    """Per-token rewards -0.1 and 1.2 are 1.1 and 1.2 still to come; with lam 1 and V 0 these are
    the advantages."""
    tokens = Packed.of([[1, 1]])
    found = generalized(torch.zeros(2), torch.tensor([1.1, 1.2]), tokens, gamma=1.0, lam=1.0)
    assert found.tolist() == pytest.approx([1.1, 1.2])


def test_the_value_loss_takes_the_worse_of_the_clipped_and_the_free_value():
    """R = 1; V_old = 0, 0, 0.9; V = 0.5, 0.1, 1.3: clipped to 0.2, 0.1, 1.1."""
    tokens = Packed.of([[1], [1], [1], [0]], values=[0.0, 0.0, 0.9, 7.0], advantages=[1.0] * 4)
    values = torch.tensor([0.5, 0.1, 1.3, math.nan], requires_grad=True)
    output = value_loss(clip=0.2, gamma=1.0, lam=1.0)(values, tokens)
    assert output.loss.item() == pytest.approx((0.8**2 + 0.9**2 + 0.3**2) / 2)
    output.loss.backward()
    assert values.grad.tolist() == pytest.approx([0.0, -0.9, 0.3, 0.0])
    assert output.metrics["value/clipped"] == 1
    assert output.metrics["value/square_error"].item() == pytest.approx(0.25 + 0.81 + 0.09)
    free = value_loss(clip=0.0, gamma=1.0, lam=1.0)(values.detach(), tokens)
    assert free.loss.item() == pytest.approx((0.5**2 + 0.9**2 + 0.3**2) / 2)
