"""An engine that was added to a running job: it serves the rollout tasks that are there.

It announces itself like any other; the trainer gives it the current weights between two updates,
and only then do rollout tasks send it requests. It is no producer of the bus: the trajectories are
those of the tasks that asked. It ends when it is told to, and hands back its requests first;
`loop` keeps engines that end with the run.
"""

import signal
import threading
import time
from contextlib import suppress

from relax_hpc import heartbeat
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.client import EngineClient
from relax_hpc.errors import EngineError
from relax_hpc.fleet import members
from relax_hpc.fleet.roster import Roster
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine.host import EngineHost
from relax_hpc.roles.engine.hosting import Slot, hosting_of
from relax_hpc.telemetry.events import EventWriter

_POLL_S = 0.25
_NOTICE_S = 3.0
"""Seconds until every router knows that a member drains: they look once a second."""
_ABORT_S = 5.0
"""Seconds for aborted requests to be answered with what there is of them."""
_UPDATE_S = 10.0
"""Seconds that an update takes at most, unless it hangs."""


def main(config: RunConfig, paths: RunPaths, context: TaskContext, events: EventWriter) -> None:
    """Keeps an engine until this task is told to end it, or the run ends."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    # Other random numbers than those of the engines that were there.
    number = config.rollout_pool.count + context.rank
    slot = Slot(context.name, number=number, local_index=context.local_rank)
    hosting = hosting_of(config, slot, transport=context.transport)
    told = heartbeat.phase("engines", waits=True)
    with told, EngineHost(hosting, paths, context, events) as host:
        drain_s = _serve(paths, slot.id, ended)
        host.drain()
        started = time.monotonic()
        left = _drain(paths, slot.id, host.token, ended, drain_s)
        _leave_update(paths, slot.id, ended)
        events.emit("drain", seconds=time.monotonic() - started, aborted=left)
    events.emit("end")


def _serve(paths: RunPaths, member: str, ended: threading.Event) -> float:
    """Waits for the word to end.

    Returns:
        How long running requests may take then, seconds.

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
    """Waits until the engine has nothing to do; at the deadline it hands back what it has.

    Returns:
        Requests that were ended at the deadline; rollout goes on with them elsewhere.
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
    """Ends its requests; whoever asked has what there is of them."""
    with suppress(EngineError), EngineClient(url, token) as engine:
        engine.abort_all()  # one that died hands back nothing, and is ended anyway
    deadline = time.monotonic() + _ABORT_S
    while _num_requests(url, token) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _num_requests(url: str, token: str) -> int:
    """0 of an engine that does not answer, too: it has nothing that could be waited for."""
    try:
        with EngineClient(url, token) as engine:
            return engine.num_requests()
    except EngineError:
        return 0


def _leave_update(paths: RunPaths, member: str, ended: threading.Event) -> None:
    """Waits for the end of an update that it takes part in, which would fail if it left."""
    deadline = time.monotonic() + _UPDATE_S
    while time.monotonic() < deadline:
        roster = Roster.read(paths)
        entry = roster.members.get(member) if roster else None
        if entry is None or entry.state != "SYNCING" or ended.wait(_POLL_S):
            return
