"""Opens the engines, the reward and the decoders of media with which a task runs episodes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from relax_hpc.config.run import RunConfig
from relax_hpc.data.media.workers import MediaWorkers
from relax_hpc.data.source import PromptSource
from relax_hpc.environments import registry as environments
from relax_hpc.environments.rewards.scorer import Scorer
from relax_hpc.inference.pool_client import PoolClient, client_of
from relax_hpc.roles.rollout.episodes import Episodes
from relax_hpc.roles.rollout.prompt_check import limits_of
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter


class SamplingParts(NamedTuple):
    engines: PoolClient
    trained: Episodes
    """Episodes that are trained on."""
    heldout: Episodes


@asynccontextmanager
async def open_sampling(
    config: RunConfig,
    paths: RunPaths,
    own: Sequence[str],
    source: PromptSource,
    events: EventWriter,
) -> AsyncIterator[SamplingParts]:
    """Opens the engines and the job's reward.

    Args:
        own: the engines to use.
        source: of the prompts, whose tokenizer and conversation are used.
        events: record loads of engines and errors of rewards.
    """
    environment = environments.make(config.rollout, paths.log("program", str(events.rank)))
    async with (
        client_of(
            config, paths, own=own, stop_token=source.tokenizer.eos_token_id, events=events
        ) as engines,
        Scorer(
            config.reward, events, paths.root, start_s=config.launch.advanced.peer_timeout_s
        ) as scorer,
        media_workers(config, source) as workers,
    ):

        def episodes(max_tokens: int, *, heldout: bool) -> Episodes:
            return Episodes(
                config, environment, engines, source.conversation,
                partial(scorer.score, heldout=heldout),
                max_tokens=max_tokens, noted=partial(scorer.note, heldout=heldout),
                workers=workers, media_tokens=source.media_tokens,
            )  # fmt: skip

        limits = limits_of(config)
        yield SamplingParts(
            engines,
            episodes(limits.trained, heldout=False),
            episodes(limits.sampled, heldout=True),
        )


@asynccontextmanager
async def media_workers(
    config: RunConfig, source: PromptSource
) -> AsyncIterator[MediaWorkers | None]:
    """Decodes media of prompts within the block; yields None for a text model."""
    if not (media := source.media_tokens):
        yield None
        return
    store = config.prompts.media.advanced.store
    async with MediaWorkers(media.recipe, media.decoders, store=store) as workers:
        yield workers
