"""One trajectory's tour of the house, on a laptop: real bus, real roles, fake engines."""

import asyncio
import json
import threading
from types import SimpleNamespace

import episode_fakes
import numpy as np
import pytest
import torch
from episode_fakes import answer
from fake_part import FakePart
from job_trees import job_of

from relax_hpc.bus import layout
from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.plan import PlanPosition
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.data.source import Prompt
from relax_hpc.roles.actor import loop as actor
from relax_hpc.roles.actor.rank0 import ActorRank0
from relax_hpc.roles.rollout.episodes import seed_of
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter, read_events
from relax_hpc.trainer.checkpoints.store import Checkpoints
from relax_hpc.weights.publish import Published
from relax_hpc.weights.transport import DigestComparison

STEPS, PROMPTS, SIBLINGS = 12, 4, 8
TEMPERATURE, SEED = 0.7, 3


class Packed(SimpleNamespace):
    def with_columns(self, **columns):
        return Packed(columns=self.columns | columns, loss_mask=self.loss_mask)


class Policy:
    """A two-token bandit shared by all fake engines. Token 1 pays; its log-odds is the weight."""

    def __init__(self):
        self.weight = torch.full((), -1.0, requires_grad=True)
        self.served = (-1, 0.0)  # version and weight, as the fake engine holds them

    @staticmethod
    def logprobs(tokens, weight):
        return torch.nn.functional.logsigmoid(torch.where(tokens == 1, weight, -weight))


class FakeSampler:
    """Is asked for groups of a prompt, which its tokens tell, and greedily for held-out ones."""

    def __init__(self, policy, max_staleness):
        self.policy, self.max_staleness = policy, max_staleness

    async def version(self):
        return self.policy.served[0]

    async def sample(self, given, draft, how, *, seed, homes):
        guid = given[1] - 100
        if how.temperature:
            assert how.temperature == TEMPERATURE
            assert how.min_version == max(guid // PROMPTS - self.max_staleness, 0)
            assert seed in [seed_of(SEED, guid, each) for each in range(SIBLINGS)]
            assert homes == ((guid, seed), guid)
        else:
            assert guid in (0, 1) and how.min_version == 0
        assert not how.routed_experts
        await asyncio.sleep(0.001)
        version, weight = self.policy.served
        assert version >= how.min_version
        odds = torch.sigmoid(torch.tensor(weight)).item()
        drawn = torch.rand((), generator=torch.Generator().manual_seed(seed)).item()
        token = int((drawn if how.temperature else 0.5) < odds)
        logprob = Policy.logprobs(torch.tensor(token), torch.tensor(weight)).item()
        return answer(draft, [token], [logprob], [(0, version)])


class FakeTrainer:
    step, dp_rank, skip, costs = 0, 0, None, {}

    def __init__(self, policy):
        self.policy = policy
        self.optimizer = torch.optim.SGD([policy.weight], lr=4.0)
        self.sums = []

    def accumulate(self, trajectories, micro_batches, objective, *, last, mini_batches):
        assert sorted(row for rows in micro_batches for row in rows) == [*range(len(trajectories))]
        advantages = np.array([row.columns["advantages"] for row in trajectories])

        def packed(of):
            return torch.tensor(np.array([of(row) for row in trajectories])).view(-1, 3)

        # Nothing but the response's token has a logprob: a mask that is shifted trains on nan.
        now = Policy.logprobs(packed(lambda row: row.token_ids), self.policy.weight)
        now = torch.where(torch.tensor([False, False, True]), now, torch.nan)
        mu = packed(lambda row: row.columns["rollout_logprobs"])
        mask = packed(lambda row: row.loss_mask).bool()
        columns = {
            "old_logprobs": now.detach().view(-1), "rollout_logprobs": mu.view(-1),
            "advantages": torch.from_numpy(advantages).repeat_interleave(3),
        }  # fmt: skip
        tokens = Packed(columns=columns, loss_mask=mask.view(-1))
        value, metrics, _ = objective.loss(now.view(-1), tokens)
        value.backward()
        count = int(mask.sum())
        self.sums.append((value.item(), metrics["loss/approx_kl"].item(), count))
        for row, logprob in zip(trajectories, mu[:, 2].tolist(), strict=True):
            assert row.version_runs.tolist() == [[2, row.policy_version_max]]
            if row.policy_version_max == self.step:  # sampled by the policy trained on now
                token = torch.tensor(row.token_ids[row.prompt_len])
                expected = Policy.logprobs(token, torch.tensor(self.policy.served[1]))
                assert logprob == pytest.approx(expected.item(), abs=1e-6)

    def update(self):
        value, approx_kl, tokens = map(sum, zip(*self.sums, strict=True))
        self.policy.weight.grad /= max(tokens, 1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.step += 1
        self.sums = []
        return {"loss": value / max(tokens, 1), "loss/approx_kl": approx_kl / max(tokens, 1)}

    def stream_weights(self):
        yield "weight", self.policy.weight

    def checkpoint_part(self, *, copy):
        return FakePart({"weight.json": json.dumps(self.policy.weight.item())})


class FakePublisher:
    def __init__(self, policy):
        self.policy = policy

    def publish(self, version, tensors, *, check, check_fenced):
        ((_, weight),) = tensors
        assert version == self.policy.served[0] + 1
        assert check == (version in (10, STEPS))  # weights.advanced.checksum_every, and the last
        self.policy.served = (version, weight.item())
        verified = DigestComparison("x", {"rollout-0": "x"}, True) if check else None
        return Published(version, ["rollout-0"], [], False, 4, 0.0, {}, verified)

    has_newcomers = wait_for_loads = close = lambda self: False
    take_ended_loads = lambda self: []  # noqa: E731


def pays(response, prompt):
    return float(response[0] == 1)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_circle_closes_and_the_policy_learns(tmp_path, max_staleness):
    config = job_of(
        seed=SEED, run_root=str(tmp_path), algorithm__preset="decoupled",
        rollout__samples_per_prompt=SIBLINGS, rollout__temperature=TEMPERATURE,
        rollout__advanced__groups_per_shard=2, actor__save_every=3,
        actor__tokens_per_micro_batch=12,  # 4 rows
        actor__advanced__portion_micro_batches=2,  # 24 tokens: a prompt group
        schedule__num_steps=STEPS, schedule__prompts_per_step=PROMPTS,
        schedule__max_staleness=max_staleness, eval__heldout={"path": "none", "every": 4},
    )  # fmt: skip
    paths, policy, world = RunPaths(config.run_dir), Policy(), SoloWorld()
    layout.create(paths.bus, config.producers, {})
    sequencer = Sequencer(paths.bus, prompts_per_step=PROMPTS, position=None)
    checkpoints = Checkpoints(paths.checkpoints, world, PlanPosition, keep=1)
    events = EventWriter(paths.events("actor", 0), "actor", 0)
    trainer, reader = FakeTrainer(policy), Reader(paths.bus)
    rank0 = ActorRank0(config, sequencer, reader, FakePublisher(policy), [checkpoints], events)

    def sample_until_finished():
        numbers = range(STEPS * PROMPTS)
        prompts = [Prompt(index=i, token_ids=[7, 100 + i], answer="1") for i in numbers]
        sampler, told = FakeSampler(policy, max_staleness), paths.events("rollout", 0)
        with Folders.open(paths.bus, 0, 1, {"run": "tour"}) as folders:
            given = prompts, prompts[:2], sampler, pays, folders, CreditTail(paths.bus)
            asyncio.run(episode_fakes.run(config, *given, EventWriter(told, "rollout", 0)))

    other = threading.Thread(target=sample_until_finished, daemon=True)
    other.start()

    def save():
        if trainer.step % 3 == 0 or trainer.step == STEPS:
            checkpoints.save(trainer, sequencer.position)
            rank0.release()

    actor.run(config, world, trainer, reader, rank0, actor.Stages(save))
    other.join(timeout=20)
    assert not other.is_alive()
    rank0.close()

    found = read_events(paths.root / "events")
    steps = [event for event in found if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.3
    # old_logprobs are this very policy's at the start of a step: nothing mixes versions up
    assert max(abs(event["loss/approx_kl"]) for event in steps) < 1e-6
    assert max(event["staleness/max"] for event in steps) <= max_staleness
    assert {event["num_trajectories"] for event in steps} == {PROMPTS * SIBLINGS}
    scores = {e["when"]: e["correct"] / e["num_samples"] for e in found if e["event"] == "eval"}
    assert (scores["before"], scores["after"]) == (0.0, 1.0)

    counts = audit(paths.bus)
    assert counts.planned == STEPS * PROMPTS * SIBLINGS
    assert (counts.planned_twice, counts.duplicates, counts.dropped) == (0, 0, 0)
    assert counts.max_staleness <= max_staleness
    assert [c.step for c in checkpoints.complete()] == [STEPS]
