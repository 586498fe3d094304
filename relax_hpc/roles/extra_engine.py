"""An engine that was added to a running job: it serves the rollout tasks that are there.

It announces itself like any other; the trainer gives it the current weights between two updates,
and only then do rollout tasks send it requests. It is no producer of the bus: the trajectories are
those of the tasks that asked.
"""

import logging
import secrets
import signal
import threading
import time
from contextlib import suppress

from relax_hpc.comm.context import TaskContext
from relax_hpc.comm.world import node_address
from relax_hpc.config import RunConfig
from relax_hpc.engines.load import num_requests
from relax_hpc.engines.process import EngineProcess, start_engine
from relax_hpc.errors import EngineError, RelaxError
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json
from relax_hpc.roles.rollout_task import _on_own_gpus, _tp_size
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.weights import members
from relax_hpc.weights.members import Member
from relax_hpc.weights.roster import Roster

log = logging.getLogger(__name__)

_POLL_S = 0.25
_NOTICE_S = 3.0
"""Until every router knows that a member drains: they look once a second."""
_ABORT_S = 5.0
"""For aborted requests to be answered with what there is of them."""


def main(config: RunConfig, paths: RunPaths, context: TaskContext, events: EventWriter) -> None:
    """Hosts an engine until this task is told to end it, or the run ends."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    member = Member(
        id=context.name,
        epoch=f"{context.attempt}-{context.start}-1",
        url="",
        token=secrets.token_hex(16),
        num_ranks=_tp_size(config.rollout),
        engine=config.rollout.engine,
        state="STARTING",
    )
    members.announce(paths, member)
    try:
        with _engine(config, paths, context, member.token) as engine:
            member = member._replace(url=engine.url, state="HEALTHY")
            members.announce(paths, member)
            events.emit("engine", url=engine.url, engine_pid=engine.pid, kind=member.engine)
            drain_s = _serve(paths, member, engine, ended)
            member = member._replace(state="DRAINING")
            members.announce(paths, member)
            started = time.monotonic()
            left = _drain(paths, member, engine, ended, drain_s)
            events.emit("drain", seconds=time.monotonic() - started, aborted=left)
    except RelaxError as error:
        reason = str(error).splitlines()[0]
        members.announce(paths, member._replace(state="FAILED", reason=reason))
        raise
    members.announce(paths, member._replace(state="GONE"))
    events.emit("end")


def _engine(config: RunConfig, paths: RunPaths, context: TaskContext, token: str) -> EngineProcess:
    return start_engine(
        config.rollout.engine,
        config.model.path,
        host=node_address(),
        token=token,
        rollout_config=_on_own_gpus(config.rollout, context),
        dtype=config.model.dtype,
        log_path=paths.log("engine", context.name),
        # Seeds that requests do not bring: others than those of the engines that were there.
        seed=config.seed + config.rollout.num_engines + context.rank,
    )


def _serve(paths: RunPaths, member: Member, engine: EngineProcess, ended: threading.Event) -> float:
    """Waits for the word to end; how long running requests may take then."""
    while not ended.wait(_POLL_S):
        engine.require_alive("serving")
        if (order := read_json(paths.drain(member.id))) is not None:
            return float(order["drain_s"])
    return 0.0


def _drain(
    paths: RunPaths,
    member: Member,
    engine: EngineProcess,
    ended: threading.Event,
    drain_s: float,
) -> int:
    """Waits until the engine has nothing to do; at the deadline it hands back what it has.

    Returns:
        Requests that were ended at the deadline; rollout goes on with them elsewhere.
    """
    if drain_s > 0:
        ended.wait(_NOTICE_S)
    deadline = time.monotonic() + drain_s
    while time.monotonic() < deadline and not ended.wait(_POLL_S):
        if _is_idle(member) and not _is_updated(paths, member):
            return 0
    left = num_requests(member.url, member.token) or 0
    if left:
        with suppress(EngineError):  # one that died has handed back nothing, and is ended anyway
            engine.client().abort_all()
        deadline = time.monotonic() + _ABORT_S
        while not _is_idle(member) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    return left


def _is_idle(member: Member) -> bool:
    return not num_requests(member.url, member.token)


def _is_updated(paths: RunPaths, member: Member) -> bool:
    """Whether it takes part in an update right now, which would fail if it left."""
    roster = Roster.read(paths)
    holding = roster and roster.members.get(member.id)
    return bool(roster and not roster.done and holding and holding.epoch == member.epoch)
