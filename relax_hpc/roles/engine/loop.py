"""A task of a pool whose weights stay as they are: keeps its engines until the run is over.

They end with the run, when nobody asks any more; `added` keeps one that ends while others ask.
"""

import asyncio
from collections.abc import Callable, Sequence

from relax_hpc import heartbeat
from relax_hpc.bus.credits import CreditTail
from relax_hpc.config.run import RunConfig
from relax_hpc.fleet import members
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine import parts
from relax_hpc.roles.engine.host import EngineHost
from relax_hpc.roles.engine.hosting import Hosting, hosting_of, slots_of
from relax_hpc.roles.engine.hosts import kept, while_kept
from relax_hpc.telemetry.events import EventWriter

POLL_S = 1.0


def main(config: RunConfig, paths: RunPaths, context: TaskContext, events: EventWriter) -> None:
    """Keeps the engines of a task of the pool that its component is named after.

    Raises:
        EngineError: one does not come back.
    """
    name = context.component
    hostings = [hosting_of(config, slot, name) for slot in slots_of(config.engines[name], context)]
    with heartbeat.phase("engines", waits=True):
        if hostings[0].slot.part:
            parts.serve(hostings[0], paths, context, events)
        else:
            _host(config, paths, context, hostings, events)
    events.emit("end")


def _host(
    config: RunConfig,
    paths: RunPaths,
    context: TaskContext,
    hostings: Sequence[Hosting],
    events: EventWriter,
) -> None:
    credits = CreditTail(paths.bus, num_steps=config.num_steps, every_s=POLL_S)

    def is_over() -> bool:
        credit = credits.latest()
        return bool(credit and credit.finished) and is_rollout_gone(config, paths)

    with kept(EngineHost(each, paths, context, events) for each in hostings) as hosts:
        asyncio.run(while_kept(hosts, until(is_over)))
    credits.close()


async def until(is_over: Callable[[], bool]) -> None:
    """Returns when nobody will ask any more."""
    while not await asyncio.to_thread(is_over):
        await asyncio.sleep(POLL_S)


def is_rollout_gone(config: RunConfig, paths: RunPaths) -> bool:
    """Whether rollout is done with the last policy too: it scores that after training has ended."""
    found = [members.find(paths, name) for name in config.rollout_engines]
    return all(member is not None and member.state in ("GONE", "FAILED") for member in found)
