"""The critic's own part: what its rows hold, what its loss is made of, what it looks at first."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from role_fakes import Events, config, row

from relax_hpc.roles.critic import loop
from relax_hpc.roles.critic.loop import CriticRank0
from relax_hpc.roles.dealing.micro_batches import OwnRows
from relax_hpc.roles.scorer.loop import Round
from relax_hpc.runtime.telemetry.timers import Timers

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
