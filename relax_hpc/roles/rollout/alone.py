"""Evaluates a model without a trainer, in one process with the rollout task's parts."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from relax_hpc.config.engines import ROLLOUT
from relax_hpc.config.run import RunConfig
from relax_hpc.data.rows import TaskShare
from relax_hpc.data.source import Prompt
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine.check import check_engine, check_pools
from relax_hpc.roles.engine.host import (
    EngineHost,
    Hosting,
    hold_engines,
    hosting_of,
    slots_of,
    while_kept,
)
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.role import Say
from relax_hpc.roles.rollout.check import read_prompts
from relax_hpc.roles.rollout.episodes import Episode, rows_of
from relax_hpc.roles.rollout.folders import Folders, provenance
from relax_hpc.roles.rollout.heldout import Evaluator
from relax_hpc.roles.rollout.loop import publish
from relax_hpc.roles.rollout.prompt_check import Sources
from relax_hpc.roles.rollout.row_gate import RowGate
from relax_hpc.roles.rollout.sampling import open_sampling
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.schema import PromptGroup

log = logging.getLogger(__name__)

ALONE = TaskShare(0, 1)
"""The only task has all prompts."""


def read(config: RunConfig, say: Say) -> Sources:
    """Reads the sets, and rejects those that cannot be sampled or scored.

    Args:
        say: told which rows are left out, or not checked yet.

    Raises:
        ConfigError: model, prompts, reward or settings do not fit each other.
    """
    facts = Facts(config.model.path)
    facts.check_weights(config.model.path)
    check_engine(config.rollout_pool, facts.shape)
    check_pools(config, facts)
    return read_prompts(config, facts, say, is_trained=False)[1]


def main(
    config: RunConfig, paths: RunPaths, context: TaskContext, sources: Sources, events: EventWriter
) -> None:
    """Starts the engines of every pool, scores each set once, and ends the engines.

    Scores of an earlier start in the same run directory are kept.
    """
    hostings = [each for name in config.engines for each in _hostings(config, context, name)]
    origin = provenance(config, context)
    with hold_engines(EngineHost(each, paths, context, events) for each in hostings) as hosts:
        RowGate(config, paths, sources, ALONE).settle()
        for host in hosts:
            host.wait_until_healthy()
        own = [each.slot.id for each in hostings if each.spec.pool == ROLLOUT]
        with Folders.open(paths.bus, *ALONE, origin) as folders:
            shards = Shards(config, sources, folders, events)
            asyncio.run(while_kept(hosts, _evaluate(config, paths, own, sources, shards, events)))
            if missing := shards.num_missing():
                log.warning(
                    "%d prompts are scored and not among the trajectories that relax-hpc view "
                    "shows: an earlier start was killed with them; their samples are in %s",
                    missing,
                    paths.root / "eval",
                )


def _hostings(config: RunConfig, context: TaskContext, name: str) -> list[Hosting]:
    slots = slots_of(config.engines[name], replace(context, component=name))
    # Nobody trains, so nobody invites.
    return [replace(hosting_of(config, slot, name), attends="none") for slot in slots]


async def _evaluate(
    config: RunConfig,
    paths: RunPaths,
    own: Sequence[str],
    sources: Sources,
    shards: "Shards",
    events: EventWriter,
) -> None:
    async with open_sampling(config, paths, own, sources.train, events) as sampling:
        evaluator = await Evaluator.of(
            config, paths, ALONE, sources.heldout, sampling.heldout, events, shards.add
        )
        try:
            evaluator.consider(0, trained=0)
            await evaluator.finish(None)
        finally:
            shards.send()


class Shards:
    """Publishes samples on the bus as well, where `relax-hpc view` finds them."""

    def __init__(
        self, config: RunConfig, sources: Sources, folders: Folders, events: EventWriter
    ) -> None:
        self._most, self._folders, self._events = (
            config.rollout.advanced.groups_per_shard,
            folders,
            events,
        )
        self._masks_errors = config.reward.masks_errors
        self._prompts = {
            name: min(settings.num_prompts, len(sources.heldout[name]))
            for name, settings in config.eval.items()
        }
        sizes = [source.num_rows for source in sources.heldout.values()]
        self._first = dict(zip(sources.heldout, accumulate(sizes, initial=0), strict=False))
        self._ready: list[PromptGroup] = []

    def add(
        self, name: str, prompt: Prompt, seeds: Sequence[int], episodes: Sequence[Episode]
    ) -> None:
        """Takes the episodes of a prompt; an earlier start may have published it."""
        guid = self._first[name] + prompt.index
        if guid in self._folders.committed:
            return
        rows = [
            row
            for sibling, (seed, episode) in enumerate(zip(seeds, episodes, strict=True))
            for row in rows_of(guid, sibling, prompt, seed, episode)
        ]
        self._ready.append(PromptGroup(guid, rows, [episode.told for episode in episodes]))
        if len(self._ready) >= self._most:
            self.send()

    def num_missing(self) -> int:
        """Returns the number of prompts that no start has published, once all are scored.

        A killed task loses the groups gathered for a shard. Their samples are kept, so they are not
        sampled again.
        """
        return sum(self._prompts.values()) - len(self._folders.committed)

    def send(self) -> None:
        if self._ready:
            publish(self._folders, self._ready, self._events, masks_errors=self._masks_errors)
            self._ready = []
