"""Builds a rollout task: its engines, a producer on the bus, and the loop between them."""

import asyncio
import resource
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from relax_hpc import heartbeat
from relax_hpc.algorithms.groups import Refill
from relax_hpc.bus.credits import CreditTail
from relax_hpc.config.run import RunConfig
from relax_hpc.environments import registry as environments
from relax_hpc.media.recipe import is_shown_media
from relax_hpc.media.stored import DECODERS, decoders
from relax_hpc.media.workers import MediaWorkers
from relax_hpc.paths import RunPaths
from relax_hpc.prompts import tokenizer as tokenizers
from relax_hpc.prompts.source import Prompt, PromptSource
from relax_hpc.rewards.scorer import Scorer
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.ending import Ending
from relax_hpc.roles.engine import parts as engine_parts
from relax_hpc.roles.engine.host import EngineHost
from relax_hpc.roles.engine.hosting import Slot, hosting_of, slots_of
from relax_hpc.roles.engine.hosts import kept, while_kept
from relax_hpc.roles.engine.pulling import NewestVersion
from relax_hpc.roles.idle import Idle
from relax_hpc.roles.rollout import loop as rollout
from relax_hpc.roles.rollout import prompt_check, row_check
from relax_hpc.roles.rollout.episodes import Episodes, Grouper
from relax_hpc.roles.rollout.evaluation import Also, Evaluator
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.roles.rollout.heldout import Board
from relax_hpc.roles.rollout.prompt_check import Sources
from relax_hpc.roles.rollout.retirement import retirement_of
from relax_hpc.roles.rollout.skips import Skips, exchange_of
from relax_hpc.roles.rollout.unfinished import MODEL, AnnouncedEnd, Unfinished, digests_of
from relax_hpc.sampling.client import PoolClient, client_of
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.telemetry.timers import Timers

SPARES = 2
"""Shards that nobody needs any more, kept to be written over."""
CREDITS_EVERY_S = 1.0
"""Time between looks at the credits: what to delete or sample again, and the end. Pacing goes by
the engine."""
REFILLED_EVERY_S = 0.2
"""The same where groups are refilled: one that takes the place of another waits for the credits."""
_READ_AT_ONCE = 16
"""Held-out prompts whose media are read at once."""


def main(config: RunConfig, paths: RunPaths, context: TaskContext, events: EventWriter) -> None:
    """Keeps one or several engines, and samples with them until the trainer has finished."""
    # Every sample in flight is a connection, here and in the engine, which inherits the limit.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    slots = slots_of(config.rollout_pool, context)
    with heartbeat.phase("engines", waits=True):
        if slots[0].part:
            engine_parts.serve(hosting_of(config, slots[0]), paths, context, events)
        else:
            _host(config, paths, context, slots, events)
    events.emit("end")


def _host(
    config: RunConfig,
    paths: RunPaths,
    context: TaskContext,
    slots: Sequence[Slot],
    events: EventWriter,
) -> None:
    row_check.check_order(paths.bus)
    number = context.rank // config.rollout_pool.nodes_per_engine
    starting = Timers()
    with starting("prompts", waits=True):
        sources = prompt_check.sources_of(
            config, prompt_check.open_files(config), tokenizers.load(config.model.path)
        )
    hostings = [hosting_of(config, slot) for slot in slots]
    with kept(EngineHost(each, paths, context, events) for each in hostings) as hosts:
        # While engines start. A task looks at what no other does, so together they see all.
        share = row_check.Share(number, config.rollout_pool.num_hosts)
        with starting("check", waits=True):
            row_check.settle(config, paths, sources, share)
        with starting("engines", waits=True):
            for host in hosts:
                host.wait_until_healthy()
        events.emit("phases", step=0, phases=starting.phases)
        own = [slot.id for slot in slots]
        with Folders.open(
            paths.bus,
            share.number,
            share.size,
            provenance(config, context),
            compress=config.bus.compress,
            spares=SPARES,
        ) as folders:
            ending = Ending(paths, context.attempt, paths.keeps(context.attempt, number))
            idle = Idle.of(config, paths, context)
            loop = _loop(config, paths, share, own, sources, folders, events, ending, idle)
            asyncio.run(while_kept(hosts, loop))


async def _loop(
    config: RunConfig,
    paths: RunPaths,
    share: row_check.Share,
    own: Sequence[str],
    sources: Sources,
    folders: Folders,
    events: EventWriter,
    ending: Ending,
    idle: Idle,
) -> None:
    async with sampling(config, paths, own, sources, events) as (sampler, episodes):
        limits = prompt_check.limits_of(config)
        group = Grouper(
            config,
            sources.train,
            episodes(limits.trained, heldout=False),
            retirement_of(config, paths),
        )
        unfinished = Unfinished(config, group, folders, events)
        await rollout.run(
            config,
            sampler,
            group,
            await evaluator_of(
                config, paths, share, sources, episodes(limits.sampled, heldout=True), events
            ),
            folders,
            CreditTail(paths.bus, num_steps=config.num_steps, every_s=credits_every_s(config)),
            events,
            AnnouncedEnd(ending, unfinished, idle, NewestVersion(config, paths)),
            Skips(config, folders, exchange_of(config, paths, share.number, share.size)),
        )


def credits_every_s(config: RunConfig) -> float:
    """Seconds between a task's looks at the credits."""
    return REFILLED_EVERY_S if isinstance(config.algorithm.groups, Refill) else CREDITS_EVERY_S


class MakeEpisodes(Protocol):
    """Makes what runs episodes of one kind."""

    def __call__(self, max_tokens: int, *, heldout: bool) -> Episodes:
        """Args:
        max_tokens: as long as a conversation may become.
        heldout: nothing is trained on them.
        """
        ...


@asynccontextmanager
async def sampling(
    config: RunConfig, paths: RunPaths, own: Sequence[str], sources: Sources, events: EventWriter
) -> AsyncIterator[tuple[PoolClient, MakeEpisodes]]:
    """Engines to be asked, the job's reward, and what runs episodes with both.

    Args:
        config: of the run.
        paths: of the run.
        own: engines to ask.
        sources: have the tokenizer.
        events: get loads of engines and errors of rewards.

    Yields:
        The engines, and what makes episodes.
    """
    tokenizer = sources.train.tokenizer
    environment = environments.make(config.rollout)
    conversation = sources.train.conversation
    async with (
        client_of(
            config, paths, own=own, stop_token=tokenizer.eos_token_id, events=events
        ) as sampler,
        Scorer(config.reward, events, paths.root, start_s=config.launch.peer_timeout_s) as scorer,
        media_workers(config, sources.train) as workers,
    ):

        def episodes(max_tokens: int, *, heldout: bool) -> Episodes:
            return Episodes(
                config, environment, sampler, conversation, partial(scorer.score, heldout=heldout),
                max_tokens=max_tokens, noted=partial(scorer.noted, heldout=heldout),
                workers=workers, media_tokens=sources.train.media_tokens,
            )  # fmt: skip

        yield sampler, episodes


@asynccontextmanager
async def media_workers(
    config: RunConfig, source: PromptSource
) -> AsyncIterator[MediaWorkers | None]:
    """Decodes media of prompts within the block; yields None for a model that reads text only."""
    if not (media := source.media_tokens):
        yield None
        return
    store = config.prompts.media.store
    async with MediaWorkers(media.recipe, media.decoders, store=store) as workers:
        yield workers


async def evaluator_of(
    config: RunConfig,
    paths: RunPaths,
    share: row_check.Share,
    sources: Sources,
    episodes: Episodes,
    events: EventWriter,
    also: Also = lambda *_: None,
) -> Evaluator:
    """An evaluator of the prompts of each held-out set that are a task's."""
    board = Board(paths, share.number, share.size)
    shares = await heldout_shares(config, share, sources)
    return Evaluator(config, shares, episodes, events, board, also)


async def heldout_shares(
    config: RunConfig, share: row_check.Share, sources: Sources
) -> dict[str, list[Prompt]]:
    """The prompts of each held-out set that this task scores."""
    shares = {}
    for name, settings in config.eval.items():
        source = sources.heldout[name]
        count = min(settings.num_prompts, len(source))
        own = range(share.number, count, share.size)
        shares[name] = list[Prompt]()
        for first in range(0, len(own), _READ_AT_ONCE):
            some = own[first : first + _READ_AT_ONCE]
            shares[name] += await asyncio.gather(*map(source.asked, some))
    return shares


def provenance(config: RunConfig, context: TaskContext) -> dict[str, str | int]:
    """Facts of their origin that all shards of a task bear."""
    try:
        build = version(config.rollout_pool.kind)
    except PackageNotFoundError:
        build = version("relax-hpc")
    return {
        "run": config.name,
        "job": context.attempt,
        "component": context.component,
        "rank": context.rank,
        "start": context.start,
        "node": context.node,
        "engine": f"{config.rollout_pool.kind} {build}",
        MODEL: digests_of(config.model.path),
        **({DECODERS: decoders()} if is_shown_media(config.model.path) else {}),
    }
