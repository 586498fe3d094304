"""Rewards asked as a run asks them: in processes of a scorer, in this one, or by its check."""

import asyncio

import pytest

from relax_hpc.config.rollout import RewardConfig
from relax_hpc.environments.rewards import registry, trial
from relax_hpc.environments.rewards.contract import Reward, Weighted
from relax_hpc.environments.rewards.scorer import Scorer
from relax_hpc.errors import ConfigError


def in_processes(config, *groups):
    """Scores of groups of samples, all asked for at once."""

    async def score():
        async with Scorer(config) as scorer:
            return await asyncio.gather(*map(scorer.score, groups))

    return asyncio.run(score())


def scores_here(reward, *samples, deadline_s=5.0):
    """Scores of a group, whose functions are called in this process."""
    return asyncio.run(reward(samples, deadline_s, lambda number: None))


def scores_by_name(name, *samples, deadline_s=5.0, **args):
    """Scores of a group by a reward of the package with these settings."""
    [term] = registry.terms_of(RewardConfig(name=name, args=args))
    return scores_here(Reward([Weighted(term.function())]), *samples, deadline_s=deadline_s)


def refusal(config, *asked):
    """The line with which the check of a job refuses its reward."""
    with pytest.raises(ConfigError) as refused:
        trial.check(config, *asked)
    assert "\n" not in str(refused.value)
    return str(refused.value)
