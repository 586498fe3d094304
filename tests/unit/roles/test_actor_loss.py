"""The loss that a run's settings give, against numbers worked by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from role_fakes import config

from relax_hpc.roles.actor.loop import objective_in

SETTINGS = {
    "algorithm__preset": "decoupled",
    "algorithm__loss__clip_low": 0.1,
    "algorithm__loss__clip_high": 0.4,
    "algorithm__correction__cap": 1.5,
}
PULLED = {"algorithm__kl__name": "k3", "algorithm__kl__coefficient": 0.25}

# pi / pi_old, advantage, pi_old / mu, pi_ref / pi
TOKENS = [
    (2.0, 1.0, 1.0, 2.0),  # up, beyond 1.4: 1.4
    (0.5, -1.0, 1.25, 0.5),  # down, beyond 0.9: -0.9, x 1.25 = -1.125
    (1.2, 2.0, 4.0, 1.0),  # up, within 1.4: 2.4, x 1.5, which is the cap: 3.6
    (0.7, 1.0, 0.5, 1.0),  # down, but pushed up again, so not clipped: 0.7, x 0.5 = 0.35
    (0.8, -3.0, 1.0, 1.0),  # down, beyond 0.9: -2.7
    (math.nan, math.nan, math.inf, math.nan),  # not trained on
]
POLICY = -(1.4 - 1.125 + 3.6 + 0.35 - 2.7)
# The KL term: 2 - ln 2 - 1 of the first, 0.5 + ln 2 - 1 of the second, 0 where they agree.
KL = 0.5


class Packed(SimpleNamespace):
    def with_columns(self, **columns):
        return Packed(loss_mask=self.loss_mask, columns=self.columns | columns)


def tokens():
    ratio, advantages, gap, ref = torch.tensor(TOKENS, dtype=torch.float64).T
    old = torch.tensor([-1.0, -2.0, -3.0, -1.5, -2.5, math.nan], dtype=torch.float64)
    now = (old + ratio.log()).requires_grad_()
    columns = {
        "old_logprobs": old, "rollout_logprobs": old - gap.log(), "advantages": advantages,
        "ref_logprobs": (now + ref.log()).detach(),
    }  # fmt: skip
    return now, Packed(loss_mask=torch.tensor([True] * 5 + [False]), columns=columns)


def test_the_policy_loss_of_the_settings_is_the_one_worked_by_hand():
    now, packed = tokens()
    del packed.columns["ref_logprobs"]
    loss, metrics, _ = objective_in(config(**SETTINGS)).loss(now, packed)
    assert loss.item() == pytest.approx(POLICY, abs=1e-12)
    assert "kl/mean" not in metrics
    assert metrics["loss/clip_fraction"].item() == 3  # beyond 0.9 or 1.4, and pushed on
    assert metrics["loss/importance_capped"].item() == 1
    assert metrics["loss/importance_mean"].item() == pytest.approx(1 + 1.25 + 1.5 + 0.5 + 1)
    loss.backward()
    # -w r A where it is not clipped, else nothing
    expected = torch.tensor([0, 0, -1.5 * 1.2 * 2, -0.5 * 0.7, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(now.grad, expected)


@pytest.mark.parametrize("placement", ["actor", "own"])
def test_with_a_reference_the_kl_term_is_added_with_the_coefficient_of_the_settings(placement):
    now, packed = tokens()
    made = config(**SETTINGS, **PULLED, reference__placement=placement)
    loss, metrics, _ = objective_in(made).loss(now, packed)
    assert loss.item() == pytest.approx(POLICY + 0.25 * KL, abs=1e-12)
    assert metrics["kl/mean"].item() == pytest.approx(KL)
    loss.backward()
    # of the KL term, 1 - pi_ref / pi
    kl = torch.tensor([-1.0, 0.5, 0, 0, 0, 0], dtype=torch.float64)
    policy = torch.tensor([0, 0, -3.6, -0.35, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(now.grad, policy + 0.25 * kl)


def test_a_reference_without_a_coefficient_only_measures():
    now, packed = tokens()
    loss, metrics, _ = objective_in(config(**SETTINGS, reference__placement="actor")).loss(
        now, packed
    )
    assert loss.item() == pytest.approx(POLICY, abs=1e-12)
    assert metrics["kl/mean"].item() == pytest.approx(KL)


def test_the_clips_and_the_cap_of_the_decoupled_objective_are_those_that_the_docs_name():
    """0.2 and 0.28 about 1, at most 2: the first token, alone, on each side of each."""
    loss = objective_in(config(algorithm__preset="decoupled")).loss
    one = torch.ones(1, dtype=torch.float64)
    for log_ratio, advantage, gap, expected in [
        (1.0, 1.0, 0.0, -1.28),
        (-1.0, -1.0, 0.0, 0.8),
        (0.0, 1.0, 1.0, -2.0),
    ]:
        columns = {
            "old_logprobs": -one, "rollout_logprobs": -one - gap, "advantages": advantage * one,
        }  # fmt: skip
        packed = Packed(columns=columns, loss_mask=one.bool())
        assert loss(-one + log_ratio, packed).loss.item() == pytest.approx(expected, abs=1e-12)
