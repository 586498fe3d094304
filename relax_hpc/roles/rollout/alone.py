"""Evaluation of a model without a trainer: the rollout task's own parts, in this one process."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from relax_hpc.config.engines import ROLLOUT
from relax_hpc.config.run import RunConfig
from relax_hpc.environments import registry as environments
from relax_hpc.models.registry import read_architecture
from relax_hpc.paths import RunPaths
from relax_hpc.prompts import tokenizer as tokenizers
from relax_hpc.prompts.source import Prompt
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine.check import check_engine, check_pools
from relax_hpc.roles.engine.host import EngineHost
from relax_hpc.roles.engine.hosting import Hosting, hosting_of, slots_of
from relax_hpc.roles.engine.hosts import kept, while_kept
from relax_hpc.roles.role import Say
from relax_hpc.roles.rollout import prompt_check, row_check
from relax_hpc.roles.rollout.build import evaluator_of, provenance, sampling
from relax_hpc.roles.rollout.check import try_reward
from relax_hpc.roles.rollout.episodes import Episode, rows_of
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.roles.rollout.loop import publish
from relax_hpc.roles.rollout.prompt_check import Files, Sources
from relax_hpc.roles.training.check import check_weights
from relax_hpc.schema import PromptGroup
from relax_hpc.telemetry.events import EventWriter

log = logging.getLogger(__name__)

ALONE = row_check.Share(0, 1)
"""The one task has all prompts."""


def read(config: RunConfig, say: Say) -> Sources:
    """Reads the sets, and refuses what cannot be sampled or scored.

    Args:
        config: of the evaluation.
        say: is told what is left out, or not looked at yet.

    Raises:
        ConfigError: model, prompts, reward or settings do not fit each other.
    """
    environments.make(config.rollout)
    sets = prompt_check.open_heldout(config)
    prompt_check.read_rows(prompt_check.heldout_by_key(sets))
    files = Files(next(iter(sets.values())), sets)  # nothing is trained on
    shape = read_architecture(config.model.path)
    check_weights(config.model.path, shape)
    check_engine(config.rollout_pool, shape)
    check_pools(config)
    sources = prompt_check.sources_of(config, files, tokenizers.load(config.model.path))
    sources = sources._replace(train_key=f"eval.{next(iter(sets))}.path")
    for remark in prompt_check.check_sample(config, sources):
        say(remark)
    try_reward(config, sources.train)
    return sources


def main(
    config: RunConfig, paths: RunPaths, context: TaskContext, sources: Sources, events: EventWriter
) -> None:
    """Starts the engines of every pool, scores each set once, and ends the engines.

    What an earlier start in the same run directory has scored is not scored again.
    """
    hostings = [each for name in config.engines for each in _hostings(config, context, name)]
    origin = provenance(config, context)
    with kept(EngineHost(each, paths, context, events) for each in hostings) as hosts:
        row_check.settle(config, paths, sources, ALONE)
        for host in hosts:
            host.wait_until_healthy()
        own = [each.slot.id for each in hostings if each.spec.pool == ROLLOUT]
        with Folders.open(paths.bus, 0, 1, origin) as folders:
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
    return [hosting_of(config, slot, name) for slot in slots]


async def _evaluate(
    config: RunConfig,
    paths: RunPaths,
    own: Sequence[str],
    sources: Sources,
    shards: "Shards",
    events: EventWriter,
) -> None:
    async with sampling(config, paths, own, sources, events) as (_, episodes):
        made = episodes(prompt_check.limits_of(config).sampled, heldout=True)
        evaluator = await evaluator_of(config, paths, ALONE, sources, made, events, shards.add)
        try:
            evaluator.consider(0, trained=0)
            await evaluator.finish(None)
        finally:
            shards.send()


class Shards:
    """Puts what is sampled on the bus as well, where `relax-hpc view` finds it."""

    def __init__(
        self, config: RunConfig, sources: Sources, folders: Folders, events: EventWriter
    ) -> None:
        self._most, self._folders, self._events = config.rollout.groups_per_shard, folders, events
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
        """Takes the episodes of a prompt; an earlier start may have had it."""
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
        """Counts prompts that no start has published, once all are scored.

        A task that is killed keeps their samples, which are not asked for again, and loses what it
        has gathered for a shard.
        """
        return sum(self._prompts.values()) - len(self._folders.committed)

    def send(self) -> None:
        """Publishes what there is."""
        if self._ready:
            publish(self._folders, self._ready, self._events, masks_errors=self._masks_errors)
            self._ready = []
