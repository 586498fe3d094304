"""Builds a rollout task: its engines, a producer on the bus, and the loop between them."""

import asyncio
from collections.abc import Sequence

from relax_hpc.config.run import RunConfig
from relax_hpc.data.rows import TaskShare
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine.host import (
    EngineHost,
    EngineSlot,
    hold_engines,
    hosting_of,
    serve_part,
    slots_of,
    while_kept,
)
from relax_hpc.roles.rollout import loop as rollout
from relax_hpc.roles.rollout.episodes import Grouper
from relax_hpc.roles.rollout.folders import Folders, provenance
from relax_hpc.roles.rollout.heldout import Evaluator
from relax_hpc.roles.rollout.prompt_check import Sources, open_sources
from relax_hpc.roles.rollout.row_gate import RowGate, check_order
from relax_hpc.roles.rollout.sampling import open_sampling
from relax_hpc.roles.rollout.skips import TaskSkips, credits_of, exchange_of, retirement_of
from relax_hpc.roles.rollout.unfinished import AnnouncedEnd, Unfinished
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.telemetry.timers import Timers

SPARES = 2
"""Obsolete shards kept for overwriting."""


def main(config: RunConfig, paths: RunPaths, context: TaskContext, events: EventWriter) -> None:
    """Keeps one or several engines, and samples with them until the trainer has finished."""
    slots = slots_of(config.rollout_pool, context)
    with heartbeat.phase("engines", waits=True):
        if slots[0].part:
            serve_part(hosting_of(config, slots[0]), paths, context, events)
        else:
            _host(config, paths, context, slots, events)
    events.emit("end")


def _host(
    config: RunConfig,
    paths: RunPaths,
    context: TaskContext,
    slots: Sequence[EngineSlot],
    events: EventWriter,
) -> None:
    check_order(paths.bus)
    number = context.rank // config.rollout_pool.nodes_per_engine
    starting = Timers()
    with starting("prompts", waits=True):
        sources = open_sources(config)
    hostings = [hosting_of(config, slot) for slot in slots]
    with hold_engines(EngineHost(each, paths, context, events) for each in hostings) as hosts:
        # While engines start. A task looks at what no other does, so together they see all.
        share = TaskShare(number, config.rollout_pool.num_hosts)
        with starting("check", waits=True):
            RowGate(config, paths, sources, share).settle()
        with starting("engines", waits=True):
            for host in hosts:
                host.wait_until_healthy()
        events.emit("phases", step=0, phases=starting.phases)
        own = [slot.id for slot in slots]
        origin = provenance(config, context)
        with Folders.open(
            paths.bus, *share, origin, compress=config.bus.advanced.compress, spares=SPARES
        ) as folders:
            loop = _loop(config, paths, context, share, own, sources, folders, events)
            asyncio.run(while_kept(hosts, loop))


async def _loop(
    config: RunConfig,
    paths: RunPaths,
    context: TaskContext,
    share: TaskShare,
    own: Sequence[str],
    sources: Sources,
    folders: Folders,
    events: EventWriter,
) -> None:
    async with open_sampling(config, paths, own, sources.train, events) as sampling:
        group = Grouper(config, sources.train, sampling.trained, retirement_of(config, paths))
        unfinished = Unfinished(config, group, folders, events)
        await rollout.run(
            config,
            sampling.engines,
            group,
            await Evaluator.of(
                config,
                paths,
                share,
                sources.heldout,
                sampling.heldout,
                events,
                trained=group.running,
            ),
            folders,
            credits_of(config, paths),
            events,
            AnnouncedEnd.of(config, paths, context, share.number, unfinished),
            TaskSkips(config, folders, exchange_of(config, paths, *share)),
        )
