"""The losses of actor and critic that a run's settings give, against numbers worked by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from role_fakes import Events, config, row

from relax_hpc.roles.actor.loop import objective_in
from relax_hpc.roles.critic import loop
from relax_hpc.roles.critic.loop import CriticRank0
from relax_hpc.roles.dealing.micro_batches import OwnRows
from relax_hpc.roles.scorer.loop import Round
from relax_hpc.runtime.telemetry.timers import Timers

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


@pytest.mark.parametrize(
    ("placement", "pulled", "coefficient"),
    [("actor", PULLED, 0.25), ("own", PULLED, 0.25), ("actor", {}, 0.0)],
)
def test_with_a_reference_the_kl_term_is_added_with_the_coefficient_of_the_settings(
    placement, pulled, coefficient
):
    now, packed = tokens()
    made = config(**SETTINGS, **pulled, reference__placement=placement)
    loss, metrics, _ = objective_in(made).loss(now, packed)
    assert loss.item() == pytest.approx(POLICY + coefficient * KL, abs=1e-12)
    assert metrics["kl/mean"].item() == pytest.approx(KL)
    loss.backward()
    # of the KL term, 1 - pi_ref / pi
    kl = torch.tensor([-1.0, 0.5, 0, 0, 0, 0], dtype=torch.float64)
    policy = torch.tensor([0, 0, -3.6, -0.35, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(now.grad, policy + coefficient * kl)


CRITIC = {"algorithm__preset": "ppo", "critic__layout": {}}


@pytest.mark.parametrize(("over_age", "trained"), [("mask", [0, 0, 0]), ("drop", [0, 0, 1])])
def test_the_critic_learns_from_no_token_that_the_actor_masks(over_age, trained):
    """Step 2 trains policy 1: with a staleness of 0, what policy 0 sampled is over age."""
    made = row(prompt=2, response=1, version=0)
    made = made._replace(columns={"values": np.zeros(3, np.float32)})
    reader = SimpleNamespace(rows=lambda task, rows, columns: [made])
    lesson = Round(2, [], [], rewards=np.array([0.5], np.float32))
    settings = config(schedule__over_age=over_age, schedule__max_staleness=0, **CRITIC)
    [found] = loop._rows_of(settings, reader, lesson, OwnRows([0], []))
    assert found.loss_mask.tolist() == trained


def test_the_critics_loss_has_the_gamma_the_lambda_and_the_clip_of_the_job():
    """V = 0.5, 0.2 and reward 1, gamma 0.9, lambda 0.5: the advantages are
    0.9 * 0.2 - 0.5 + 0.45 * 0.8 = 0.04 and 1 - 0.2 = 0.8, so R = 0.54 and 1.

    Values that are now 0.54 and 0.2 are held at 0.52 by a clip of 0.02.
    """
    settings = config(
        **CRITIC, algorithm__advantage__gamma=0.9, critic__advanced__returns_lambda=0.5,
        critic__advanced__value_clip=0.02,
    )  # fmt: skip
    tokens = SimpleNamespace(
        loss_mask=torch.tensor([True, True]),
        sequence_ids=torch.zeros(2, dtype=torch.int64),
        groups=torch.zeros(1, dtype=torch.int64),
        columns={"values": torch.tensor([0.5, 0.2]), "advantages": torch.ones(2)},
    )
    found = loop.objective_of(settings).loss(torch.tensor([0.54, 0.2]), tokens)
    assert found.loss.item() == pytest.approx((0.02**2 + 0.8**2) / 2, rel=1e-5)
    assert found.metrics["value/return"].item() == pytest.approx(1.54)


def test_what_is_planned_while_shards_are_looked_for_is_learned_before_they_are_valued():
    """A shard that is committed between two looks at the plan waits for the next look."""
    planned, committed = [], []

    class Plan:
        def next_batch(self):
            found = planned.pop() if planned else None
            if found is None:  # just after this look a shard is committed, its batch planned before
                planned.append(SimpleNamespace(step=1))
                committed.append("shard")
            return found

    credits = SimpleNamespace(latest=lambda: None)
    rank0 = CriticRank0(config(**CRITIC), None, None, credits, Plan(), Events())
    rank0.ready = lambda credit: list(committed)
    rank0.begin = lambda shards, timers: ("round", shards)
    rank0._deal_lesson = lambda batch: ("lesson", batch.step)
    assert rank0.next_task(0, Timers()) == ("lesson", 1)
