"""Keeps engines for other tasks: `main` those of a pool with fixed weights, `main_of_added` extras.

Engines of a pool end with the run. An engine that was added to a running job announces itself like
any other; the trainer gives it the current weights between two updates, and only then do rollout
tasks send it requests. It writes nothing to the bus: trajectories belong to the tasks that sampled
them. When told to end, it first hands back its requests.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from relax_hpc.bus.credits import CreditTail
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import EngineError
from relax_hpc.inference import members
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.members import Roster
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
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter

POLL_S = 1.0


def main(config: RunConfig, paths: RunPaths, context: TaskContext, events: EventWriter) -> None:
    """Keeps the engines of a task; its component is named after the pool.

    Raises:
        EngineError: one does not come back.
    """
    name = context.component
    hostings = [hosting_of(config, slot, name) for slot in slots_of(config.engines[name], context)]
    with heartbeat.phase("engines", waits=True):
        if hostings[0].slot.part:
            serve_part(hostings[0], paths, context, events)
        else:
            credits = CreditTail(paths.bus, num_steps=config.num_steps, every_s=POLL_S)

            def is_over() -> bool:
                credit = credits.latest()
                return bool(credit and credit.finished) and is_rollout_gone(config, paths)

            made = (EngineHost(each, paths, context, events) for each in hostings)
            with hold_engines(made) as hosts:
                asyncio.run(while_kept(hosts, until(is_over)))
            credits.close()
    events.emit("end")


async def until(is_over: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(is_over):
        await asyncio.sleep(POLL_S)


def is_rollout_gone(config: RunConfig, paths: RunPaths) -> bool:
    """Whether rollout has finished the last policy, too: it scores that after training has
    ended."""
    found = [members.find(paths, name) for name in config.rollout_engines]
    return all(member is not None and member.state in ("GONE", "FAILED") for member in found)


_POLL_S = 0.25
_NOTICE_S = 3.0
"""Seconds until every router knows that a member drains: they poll once a second."""
_ABORT_S = 5.0
"""Seconds for aborted requests to return their tokens."""
_UPDATE_S = 10.0
"""Most seconds of an update, unless it hangs."""


def main_of_added(
    config: RunConfig, paths: RunPaths, context: TaskContext, events: EventWriter
) -> None:
    """Keeps an engine until this task is told to end, or the run ends."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    # Other random numbers than those of the engines that were there.
    number = config.rollout_pool.count + context.rank
    slot = EngineSlot(context.name, number=number, local_index=context.local_rank)
    hosting = hosting_of(config, slot, transport=context.transport)
    if hosting.attends == "mpi_job":  # its step is not of that world
        hosting = replace(hosting, attends="none")
    told = heartbeat.phase("engines", waits=True)
    with told, hold_engines([EngineHost(hosting, paths, context, events)]) as (host,):
        drain_s = _serve(paths, slot.id, ended)
        host.drain()
        started = time.monotonic()
        left = _drain(paths, slot.id, host.token, ended, drain_s)
        _leave_update(paths, slot.id, ended)
        events.emit("drain", seconds=time.monotonic() - started, aborted=left)
    events.emit("end")


def _serve(paths: RunPaths, member: str, ended: threading.Event) -> float:
    """Waits for the order to end.

    Returns:
        Seconds that running requests may take then.

    Raises:
        EngineError: the engine does not come back.
    """
    while not ended.wait(_POLL_S):
        now = members.find(paths, member)
        if now and now.state == "FAILED":
            raise EngineError(f"engine {member} failed: {now.reason}")
        if (order := read_json(paths.drain(member))) is not None:
            return float(order["drain_s"])
    return 0.0


def _drain(paths: RunPaths, name: str, token: str, ended: threading.Event, drain_s: float) -> int:
    """Waits until the engine is idle; at the deadline it hands back its requests.

    Returns:
        Requests ended at the deadline; rollout continues them elsewhere.
    """
    if drain_s > 0:
        ended.wait(_NOTICE_S)
    deadline = time.monotonic() + drain_s
    while (member := members.find(paths, name)) and member.url:
        left = _num_requests(member.url, token)
        if time.monotonic() > deadline or ended.wait(_POLL_S):
            if left:
                _hand_back(member.url, token)
            return left
        if not left:
            return 0
    return 0  # it never came up


def _hand_back(url: str, token: str) -> None:
    """Ends its requests; clients keep the tokens so far."""
    with suppress(EngineError), EngineClient(url, token) as engine:
        engine.abort_all()  # one that died hands back nothing, and is ended anyway
    deadline = time.monotonic() + _ABORT_S
    while _num_requests(url, token) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _num_requests(url: str, token: str) -> int:
    """Returns 0 also if the engine does not answer: then there is nothing to wait for."""
    try:
        with EngineClient(url, token) as engine:
            return engine.num_requests()
    except EngineError:
        return 0


def _leave_update(paths: RunPaths, member: str, ended: threading.Event) -> None:
    """Waits for the end of an update in progress, which would fail if the engine left."""
    deadline = time.monotonic() + _UPDATE_S
    while time.monotonic() < deadline:
        roster = Roster.read(paths)
        entry = roster.members.get(member) if roster else None
        if entry is None or entry.state != "SYNCING" or ended.wait(_POLL_S):
            return
