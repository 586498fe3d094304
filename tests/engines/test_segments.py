"""An episode in one sequence and in two teaches the same, where the mean is over tokens."""

import numpy as np
import pytest
import torch
from trainers import job

from relax_hpc.algorithms.composition import objective_of
from relax_hpc.bus.reader import BatchIndex
from relax_hpc.bus.shards.encode import from_columns, to_columns
from relax_hpc.cli.demo import models
from relax_hpc.environments.record import Call, EpisodeRecord, sequences
from relax_hpc.inference.generation import Draft
from relax_hpc.roles.dealing.portions import Comparison, values_of
from relax_hpc.schema import FinishReason, PromptGroup, Trajectory
from relax_hpc.trainer.megatron import packing

PROMPT, TOOL = [3, 5, 7], [9, 2]
FIRST, SECOND = ([4, 6], [-1.0, -0.5]), ([8, 1, 4], [-2.0, -1.5, -0.25])
OTHERS = [([5, 5, 1], [-1.0, -1.0, -2.0]), ([2], [-3.0])]
REWARDS = [1.0, 0.0, 0.5]


def call(given, sampled, logprobs):
    return Call(given, draft=Draft(sampled, logprobs, [(0, 0)]), finish=FinishReason.STOP)


def whole():
    """Asked twice, the second time after the first answer and a word of a tool."""
    [sequence] = sequences(
        EpisodeRecord([call(PROMPT, *FIRST), call([*PROMPT, *FIRST[0], *TOOL], *SECOND)])
    )
    return [sequence]


def cut():
    """The same two answers after the same tokens, in a sequence each: the masks are disjoint."""
    first = sequences(EpisodeRecord([call(PROMPT, *FIRST)]))
    return first + sequences(EpisodeRecord([call([*PROMPT, *FIRST[0], *TOOL], *SECOND)]))


def rows_of(episode):
    """A group of three episodes, of which the first is `episode`, from a shard of the bus."""
    others = [sequences(EpisodeRecord([call(PROMPT, *each)])) for each in OTHERS]
    group = [
        Trajectory(
            guid=0, sibling=sibling, segment=segment, prompt_index=0, seed=0,
            token_ids=sequence.token_ids, prompt_len=sequence.prompt_len,
            loss_mask=sequence.loss_mask, version_runs=sequence.version_runs,
            finish=sequence.finish, reward=REWARDS[sibling], turns=sequence.turns,
            columns={"rollout_logprobs": sequence.logprobs},
        )
        for sibling, made in enumerate([episode, *others])
        for segment, sequence in enumerate(made)
    ]  # fmt: skip
    return from_columns(to_columns([PromptGroup(0, group)]))


def index_of(rows):
    return BatchIndex(
        guid=np.array([row.guid for row in rows]),
        sibling=np.array([row.sibling for row in rows]),
        segment=np.array([row.segment for row in rows]),
        rewards=np.array([row.reward for row in rows], np.float32),
        reward_error=np.array([row.reward_error for row in rows], np.uint8),
        prompt_len=np.array([row.prompt_len for row in rows]),
        response_len=np.array([len(row.token_ids) - row.prompt_len for row in rows]),
        policy_version_min=np.zeros(len(rows), np.int32),
        policy_version_max=np.zeros(len(rows), np.int32),
        finish=np.zeros(len(rows), np.uint8),
    )


@pytest.fixture(scope="module")
def policy():
    return models.model(models.tokenizer(), seed=3)


def gradient(policy, rows, *, normalize_std):
    """Returns GRPO's gradient, [parameters], of the token mean as the trainer adds it up."""
    advantage = {"name": "grpo" if normalize_std else "group_mean"}
    keys = {"preset": "decoupled", "advantage": advantage}
    settings = job("m", algorithm=keys, rollout={"samples_per_prompt": 3}).algorithm
    columns, _ = values_of(index_of(rows), Comparison(settings, 3, longest=8))
    loss = objective_of(settings).loss
    policy.zero_grad()
    tokens = 0
    for number, row in enumerate(rows):
        row = row.with_columns(advantages=columns["advantages"][number])
        batch = packing.build([row], [0], device=torch.device("cpu"))
        logits = policy(batch.token_ids[None]).logits[0, :-1]
        known = logits.log_softmax(-1).gather(1, batch.token_ids[1:, None])[:, 0]
        logprobs = torch.cat([known.new_zeros(1), known])
        loss(logprobs, batch.with_columns(old_logprobs=logprobs.detach())).loss.backward()
        tokens += int(batch.loss_mask.sum())
    assert tokens == 2 + 3 + 3 + 1
    return torch.cat([p.grad.reshape(-1) for p in policy.parameters()]) / tokens


@pytest.mark.parametrize("normalize_std", [False, True])
def test_an_episode_in_two_sequences_has_the_gradient_that_it_has_in_one(policy, normalize_std):
    one = gradient(policy, rows_of(whole()), normalize_std=normalize_std)
    rows = rows_of(cut())
    assert [(row.sibling, row.segment) for row in rows] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    two = gradient(policy, rows, normalize_std=normalize_std)
    assert one.norm() > 1e-2
    torch.testing.assert_close(two, one, atol=1e-6 * one.norm().item(), rtol=1e-4)
