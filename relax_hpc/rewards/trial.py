"""Whether a reward works, before anything is queued."""

import asyncio

from relax_hpc.config.reward import RewardConfig
from relax_hpc.errors import ConfigError
from relax_hpc.rewards import registry
from relax_hpc.rewards.contract import Sample
from relax_hpc.rewards.process import Worker, WorkerLostError
from relax_hpc.rewards.scorer import limits_of


def check(config: RewardConfig, sample: Sample) -> None:
    """Calls a plugin once, in a process as it will have; what is built in is not called.

    Raises:
        ConfigError: there is no such reward, it cannot be imported or called, or gave no score.
    """
    place = registry.place_of(config.name)
    if registry.is_plugin(config.name):
        try:
            asyncio.run(_try(place, config, sample))
        except (ConfigError, WorkerLostError) as error:
            raise ConfigError(f"reward.name = {config.name!r}: {error}; correct it") from None


async def _try(place: str, config: RewardConfig, sample: Sample) -> None:
    worker = await Worker.start(place, limits_of(config))
    try:
        group = [sample, sample] if worker.kind.sees_group else [sample]
        for score in await worker.ask(group):
            if score.error is not None:
                raise ConfigError(f"scoring a response to a prompt of yours, {score.error}")
    finally:
        await worker.end()
