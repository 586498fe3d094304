"""Tries a reward out before anything is queued."""

import asyncio
from collections.abc import Collection

from relax_hpc.config.reward import RewardConfig
from relax_hpc.errors import ConfigError
from relax_hpc.rewards import registry
from relax_hpc.rewards.contract import Sample
from relax_hpc.rewards.process import Worker, WorkerLostError
from relax_hpc.rewards.scorer import limits_of


def check(config: RewardConfig, sample: Sample, pools: Collection[str] = ()) -> None:
    """Calls a plugin once, in a process as it will have; what is built in is not called.

    One that asks engines is not called either, since there are none yet.

    Args:
        config: of the reward.
        sample: to be scored.
        pools: that the job has besides the policy's own.

    Raises:
        ConfigError: there is no such reward, it cannot be imported or called, or gave no score.
    """
    place = registry.place_of(config.name)
    if registry.is_plugin(config.name):
        try:
            asyncio.run(_try(place, config, sample, pools))
        except (ConfigError, WorkerLostError) as error:
            raise ConfigError(f"reward.name = {config.name!r}: {error}; correct it") from None


async def _try(place: str, config: RewardConfig, sample: Sample, pools: Collection[str]) -> None:
    worker = await Worker.start(place, limits_of(config))
    try:
        if worker.kind.pools is not None:
            _check_pools(worker.kind.pools, pools)
            return
        group = [sample, sample] if worker.kind.sees_group else [sample]
        for score in await worker.ask(group):
            if score.error is not None:
                raise ConfigError(f"scoring a response to a prompt of yours, {score.error}")
    finally:
        await worker.end()


def _check_pools(asked: Collection[str], pools: Collection[str]) -> None:
    missing = sorted(set(asked) - set(pools))
    if missing or not pools:
        name = missing[0] if missing else "<name>"
        raise ConfigError(
            f"it asks engines{f' of a pool {name!r}' if missing else ''}, and the job has "
            f"{', '.join(pools) or 'no other than rollout'}; add a table "
            f"[engines.{name}]"
        )
