"""An engine over several nodes: one task per node runs a part of it, and the first is its host.

They meet through the run directory. For every start the host writes a call: its name, and where
the parts' ranks meet. A part that ends says so, and the host then calls for another start.
"""

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from relax_hpc.comm.address import node_address
from relax_hpc.engines.ports import held_port
from relax_hpc.engines.process import start_engine
from relax_hpc.engines.sglang.launch import ALONE, Share
from relax_hpc.errors import EngineError, PeerTimeoutError
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine.hosting import Hosting
from relax_hpc.telemetry.events import EventWriter

log = logging.getLogger(__name__)

_POLL_S = 0.5


class Call(NamedTuple):
    """An order of an engine's host to its other parts."""

    start: str
    address: str
    """Meeting place of the ranks of that start, "host:port"."""
    over: bool
    """Nothing more: the engine is not started again."""


class Parts:
    """The other parts of an engine, as its host sees them; without any, it does nothing."""

    def __init__(self, paths: RunPaths, engine: str, nodes: int) -> None:
        self._paths, self._engine, self._nodes = paths, engine, nodes

    @contextmanager
    def called(self, start: str) -> Iterator[Share]:
        """Calls for a start, and holds the port where its ranks meet for the length of the block.

        Yields:
            The host's own share.
        """
        if self._nodes == 1:
            yield ALONE
            return
        host = node_address()
        with held_port(host) as port:
            call = Call(start, f"{host}:{port}", over=False)
            write_json(self._paths.engine_call(self._engine), call._asdict())
            yield Share(self._nodes, 0, call.address)

    def end(self, start: str) -> str:
        """Why one of them ended in that start; "" if none did."""
        for part in range(1, self._nodes):
            record = read_json(self._paths.engine_part(self._engine, part))
            if record is not None and record["start"] == start:
                return f"lost part {part} on {record['node']}: it {record['reason']}"
        return ""

    def dismiss(self, start: str) -> None:
        """Lets their tasks end; `start` is the last one."""
        if self._nodes > 1:
            call = Call(start, "", over=True)
            write_json(self._paths.engine_call(self._engine), call._asdict())


def serve(hosting: Hosting, paths: RunPaths, context: TaskContext, events: EventWriter) -> None:
    """Runs a part in every start that the engine's host calls for, until it is dismissed.

    Raises:
        PeerTimeoutError: the host does not call.
    """
    part, slot = _Part(hosting, paths, context), hosting.slot
    call = part.next_call("")
    while not call.over:
        reason = part.run(call)
        if reason is not None:
            log.warning("part %d of %s %s", slot.part, slot.id, reason)
            first_line = reason.splitlines()[0]
            events.emit("engine_end", id=slot.id, start=call.start, reason=first_line)
            part.report(call, reason)
        call = part.next_call(call.start)


class _Part:
    def __init__(self, hosting: Hosting, paths: RunPaths, context: TaskContext) -> None:
        self._hosting, self._paths, self._context = hosting, paths, context
        self._slot = hosting.slot
        # Records of an earlier start of this step may lie around; its host is gone.
        self._prefix = f"{context.attempt}-{context.start}-"

    def call(self) -> Call | None:
        record = read_json(self._paths.engine_call(self._slot.id))
        call = Call(**record) if record else None
        return call if call and call.start.startswith(self._prefix) else None

    def next_call(self, after: str) -> Call:
        deadline = time.monotonic() + self._hosting.peer_timeout_s
        while (call := self.call()) is None or (not call.over and call.start == after):
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"the host of {self._slot.id} called for no start within "
                    f"{self._hosting.peer_timeout_s} s after {after or 'its own'}"
                )
            time.sleep(_POLL_S)
        return call

    def report(self, call: Call, reason: str) -> None:
        path = self._paths.engine_part(self._slot.id, self._slot.part)
        first_line = reason.splitlines()[0]
        write_json(path, {"start": call.start, "node": self._context.node, "reason": first_line})

    def run(self, call: Call) -> str | None:
        """One start, to its end: why it ended, or None if the host calls for something else."""

        def check(phase: str) -> None:
            if self.call() != call:
                raise _CalledOff

        slot, spec = self._slot, self._hosting.spec
        try:
            engine = start_engine(
                spec,
                host=node_address(),
                token=secrets.token_hex(16),
                log_path=self._paths.engine_log(f"{slot.id}.part{slot.part}", call.start),
                share=Share(spec.nodes, slot.part, call.address),
                least_gpus=self._hosting.least_gpus(self._context),
                progress=check,
            )
        except _CalledOff:
            return None
        except EngineError as error:
            return f"did not start: {error}"
        with engine:
            while self.call() == call:
                if end := engine.end():
                    return f"{end}\n{engine.last_lines()}"
                time.sleep(_POLL_S)
        return None


class _CalledOff(Exception):  # noqa: N818
    """The host wants another start, or none."""
