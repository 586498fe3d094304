"""The rows that the rollout makes of what engines sample: every field, by hand."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from episode_fakes import answer, episodes
from role_fakes import config, sampled

from relax_hpc.data.source import Prompt
from relax_hpc.environments.rewards.contract import Score, fail
from relax_hpc.errors import RewardError
from relax_hpc.inference.generation import Sampling
from relax_hpc.roles.rollout.episodes import Grouper
from relax_hpc.schema import FinishReason

PROMPT = Prompt(index=7, token_ids=[11, 12, 13], answer="42")
# H(run seed, guid, sibling): the first 31 bits of the SHA-256 of "9/5/0" and "9/5/1".
SEEDS = [1_425_274_110, 2_044_686_533]
RESPONSES = [
    sampled(
        [21, 22, 23, 24], [-0.5, -0.25, -1.0, -2.0], [(0, 6), (2, 7)], FinishReason.LENGTH,
        np.arange(7 * 4, dtype=np.int16).reshape(7, 4),
    ),
    sampled([31], [-0.125], [(0, 7)]),
]  # fmt: skip


class Prompts:
    async def fetch(self, ordinal):
        assert ordinal == 5
        return PROMPT


class Sampler:
    """Is asked once for each sibling, for this."""

    def __init__(self, responses=RESPONSES, **wanted):
        self.responses, self.wanted, self.asked = responses, wanted, []

    async def sample(self, given, draft, how, *, seed, homes):
        self.asked.append(how)
        assert given == [11, 12, 13]
        assert homes == ((5, seed), 5)
        assert how == Sampling(0.7, 256, max_tokens=1 << 20, min_version=4)._replace(**self.wanted)
        response = self.responses[SEEDS.index(seed)]
        return answer(
            draft, response.token_ids, response.logprobs, response.version_runs, response.finish,
            response.routed_experts,
        )  # fmt: skip


def score(response, prompt):
    assert prompt.answer == PROMPT.answer
    return {(21, 22, 23, 24): 0.25, (31,): 1.0, (): -1.0}[tuple(response)]


def group(sampler, score=score, **settings):
    settings = config(seed=9, rollout__temperature=0.7, **settings)
    made = Grouper(settings, Prompts(), episodes(settings, sampler, score))
    return asyncio.run(made(5, 4))


def test_a_trajectory_is_the_prompt_and_the_response_with_everything_at_its_own_token():
    """Three tokens of prompt; two by policy 6, two by policy 7."""
    made = group(Sampler())
    assert made.guid == 5
    first, second = made.trajectories
    assert [(row.guid, row.sibling, row.prompt_index, row.prompt_len, row.environment, row.media)
            for row in made.trajectories] == [(5, 0, 7, 3, 0, ()), (5, 1, 7, 3, 0, ())]  # fmt: skip
    assert [row.seed for row in made.trajectories] == SEEDS
    assert first.token_ids.tolist() == [11, 12, 13, 21, 22, 23, 24]
    assert first.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert first.columns["rollout_logprobs"].tolist() == [0, 0, 0, -0.5, -0.25, -1.0, -2.0]
    assert first.version_runs.tolist() == [[3, 6], [5, 7]]
    assert first.turns.tolist() == [[0, 0], [3, 1]]
    assert (first.policy_version_min, first.policy_version_max) == (6, 7)
    assert (first.finish, first.reward) == (FinishReason.LENGTH, 0.25)
    assert first.routed_experts is RESPONSES[0].routed_experts
    assert second.token_ids.tolist() == [11, 12, 13, 31]
    assert second.loss_mask.tolist() == [0, 0, 0, 1]
    assert second.columns["rollout_logprobs"].tolist() == [0, 0, 0, -0.125]
    assert second.version_runs.tolist() == [[3, 7]]
    assert (second.finish, second.reward) == (FinishReason.STOP, 1.0)
    kinds = [first.token_ids.dtype, first.loss_mask.dtype, first.columns["rollout_logprobs"].dtype]
    assert [*kinds, first.version_runs.dtype] == [np.int32, np.uint8, np.float32, np.int32]
    assert second.routed_experts is None and second.columns.keys() == {"rollout_logprobs"}


def test_a_response_without_a_token_is_a_row_of_its_prompt():
    empty = sampled([], [], [], FinishReason.ABORT)
    row = group(Sampler([empty, empty])).trajectories[1]
    assert row.token_ids.tolist() == [11, 12, 13]
    assert row.loss_mask.tolist() == [0, 0, 0]
    assert row.version_runs.shape == (0, 2)
    assert (row.finish, row.reward, row.policy_version_min) == (FinishReason.ABORT, -1.0, -1)


def test_routed_experts_are_asked_for_if_the_run_wants_them():
    sampler = Sampler(routed_experts=True)
    group(sampler, engines__rollout__kind="sglang", rollout__advanced__routed_experts=True)
    assert [how.routed_experts for how in sampler.asked] == [True, True]


def test_a_row_knows_the_parts_of_its_reward_and_whether_it_failed():
    """A part that is alone is the reward, and not said twice."""
    parts = {"right": 1.0, "short": -0.5}
    scores = {31: Score(0.5, parts), 21: fail("a bug")}
    first, second = group(Sampler(), lambda tokens, _: scores[tokens[0]]).trajectories
    assert (first.reward, first.parts, first.reward_error) == (0.0, {}, True)
    assert (second.reward, second.parts, second.reward_error) == (0.5, parts, False)
    plain = group(Sampler()).trajectories[1]
    assert (plain.parts, plain.reward_error) == ({}, False)


async def test_a_group_is_refused_once_too_many_rewards_have_failed():
    """All fail, and 0.4 * 500 are allowed."""
    settings = config(seed=9, rollout__temperature=0.7, reward__advanced__most_errors=0.4)
    made = Grouper(settings, Prompts(), episodes(settings, Sampler(), lambda *_: fail("a bug")))

    with pytest.raises(
        RewardError, match=r"failed for 202 of the last 202 .*202 x a bug, first in 5/0"
    ):
        for _ in range(100):
            assert len((await made(5, 4)).trajectories) == 2
        await made(5, 4)


@pytest.mark.parametrize("names", [["sums"], ["sums", "code"]])
def test_the_reward_of_a_source_is_told_where_there_are_several(monkeypatch, names):
    def score(response, prompt):
        return fail("it fell over") if tuple(response) == (31,) else 0.25

    monkeypatch.setattr(f"{__name__}.PROMPT", replace(PROMPT, source="sums"))
    made = group(Sampler(), score, prompts={"sources": {name: {"path": name} for name in names}})
    told = [{"reward/sums": 0.25}, {}] if len(names) > 1 else [{}, {}]
    assert [{k: v for k, v in each.items() if k[:5] != "time/"} for each in made.metrics] == told
