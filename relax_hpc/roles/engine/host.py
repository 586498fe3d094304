"""Keeps one engine running: starts it, announces it, watches it, and starts it again.

The thread that does so owns the engine, which dies with it. The role's own loop goes on meanwhile:
it sees in the member record whether there is an engine, and waits or asks another.
"""

import asyncio
import itertools
import logging
import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from relax_hpc.comm.address import node_address
from relax_hpc.config.run import RESTART_DELAYS_S, RESTART_WINDOW_S
from relax_hpc.engines import capabilities
from relax_hpc.engines.capabilities import Capabilities
from relax_hpc.engines.child import EngineProcess
from relax_hpc.engines.process import start_engine
from relax_hpc.engines.pulse import Pulse
from relax_hpc.engines.sglang.launch import check_recompute
from relax_hpc.errors import EngineError, EngineUnfitError
from relax_hpc.fleet import lease, members, roster, switches
from relax_hpc.fleet.members import Member, State
from relax_hpc.fleet.roster import Roster, RosterEntry
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine.hosting import Hosting
from relax_hpc.roles.engine.parts import Parts
from relax_hpc.roles.engine.pulling import Puller
from relax_hpc.run_secret import RunSecret
from relax_hpc.telemetry.events import EventWriter

log = logging.getLogger(__name__)

_WATCH_S = 0.5
_ROSTER_S = 1.0
_HUNG_GRACE_S = 1.0
_FOR_GOOD = re.compile(r"No module named|\bConfigError: ")
"""Words of a process that would end so again, however often it is started."""


class EngineHost:
    """One engine of a task, from the first start to the clean stop. A context manager."""

    def __init__(
        self, hosting: Hosting, paths: RunPaths, context: TaskContext, events: EventWriter
    ) -> None:
        self._hosting, self._paths, self._context = hosting, paths, context
        self._slot, self._spec, self._events = hosting.slot, hosting.spec, events
        self._roster = roster.follow(paths)
        self._parts = Parts(paths, hosting.slot.id, self._spec.nodes)
        self._secret = RunSecret.read(paths.secret)
        self._member = self._new_member(0)
        self._announcing = threading.Lock()
        self._healthy, self._stopping = threading.Event(), threading.Event()
        self._draining = False
        self._puller: Puller | None = None
        # A thread of its own, since the kernel ends the engine with the thread that started it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"host of {hosting.slot.id}")
        self._life: Future[None] | None = None

    def __enter__(self) -> Self:
        self._life = self._thread.submit(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the engine; it is GONE, unless it FAILED before."""
        self.ask_to_stop()
        self._thread.shutdown(wait=True)

    def ask_to_stop(self) -> None:
        """Lets several be stopped at the same time; leaving the context waits for it."""
        self._stopping.set()

    @property
    def token(self) -> str:
        """The token that the present start of the engine asks its callers for."""
        return self._secret.engine_token(self._member.id, self._member.start)

    def wait_until_healthy(self) -> None:
        """Blocks until the engine can be asked for the first time.

        Raises:
            EngineError: it could not be started.
        """
        assert self._life is not None
        while not self._healthy.wait(_WATCH_S):
            if self._life.done():
                self._life.result()
                raise EngineError(f"engine {self._slot.id} was stopped before it was healthy")

    async def failure(self) -> None:
        """Returns only when the engine was stopped.

        Raises:
            EngineError: it does not come back by itself: the role has to end.
        """
        assert self._life is not None
        await asyncio.shield(asyncio.wrap_future(self._life))

    def drain(self) -> None:
        """Announces that the engine gets nothing new; stopping it is left to the caller."""
        self._draining = True
        self._announce("DRAINING")

    def _keep(self) -> None:
        """Start after start, until it is stopped or has to be restarted too often."""
        ends: list[float] = []
        try:
            for start in itertools.count(1):
                reason = self._live(start)
                if reason is None or self._draining:
                    self._announce("GONE")
                    return
                ends = self._allow_restart([*ends, time.monotonic()], reason)
                self._announce("STARTING", f"again, since it {reason}".splitlines()[0])
                self._stopping.wait(RESTART_DELAYS_S[min(len(ends), len(RESTART_DELAYS_S)) - 1])
        except BaseException as error:
            self._announce("FAILED", _in_short(error))
            raise
        finally:
            self._parts.dismiss(self._member.start)

    def _allow_restart(self, ends: list[float], reason: str) -> list[float]:
        """The ends that count, if there are not too many of them."""
        most = self._hosting.max_restarts
        first_line = reason.splitlines()[0]
        self._events.emit(
            "engine_end", id=self._slot.id, start=self._member.start, reason=first_line
        )
        log.warning("engine %s %s", self._slot.id, reason)
        recent = [end for end in ends if end > ends[-1] - RESTART_WINDOW_S]
        if len(recent) > most:
            raise EngineError(
                f"engine {self._slot.id} ended {len(recent)} times within {RESTART_WINDOW_S:.0f} s "
                f"(launch.max_restarts = {most}); at last it {reason}"
            )
        return recent

    def _live(self, start: int) -> str | None:
        """One start of the engine, to its end.

        Returns:
            Why it ended; None if it was asked to.

        Raises:
            EngineError: the very first start failed, for which the reason is the job's rather
                than bad luck. (Over several nodes, ports cannot all be held: luck has a part.)
            EngineUnfitError: likewise, and the task's next start would fail so, too.
            ConfigError: GPUs that were asked for are missing.
        """
        self._member = self._new_member(start)
        if self._stopping.is_set():
            return None
        try:
            engine = self._start()
        except _Stopped:
            return None
        except EngineError as error:
            if start == 1 and self._spec.nodes == 1:
                said = str(error)
                is_for_good = _FOR_GOOD.search(said.partition("\n")[0])
                kind = EngineUnfitError if is_for_good else EngineError
                raise kind(f"engine {self._slot.id}: {said}") from error
            return f"did not start: {error}"
        with engine:
            return self._serve(engine)

    def _start(self) -> EngineProcess:
        self._announce("STARTING", "starting its process")
        switches.forget_earlier(self._paths, self._slot.id)
        with self._parts.called(self._member.start) as share:
            return start_engine(
                self._spec,
                host=node_address(),
                token=self.token,
                log_path=self._paths.engine_log(self._slot.id, self._member.start),
                share=share,
                least_gpus=self._hosting.least_gpus(self._context),
                progress=self._progress,
                may_compute=self._has_gpus,
            )

    def _has_gpus(self) -> bool:
        """Whether the engine may take memory of its GPUs; of the trainer's see `fleet.lease`."""
        if self._stopping.is_set():
            raise _Stopped
        if not self._hosting.shares_gpus:
            return True
        attempt = self._context.attempt
        if self._member.state == "WAITING" and lease.is_with_engines(self._paths, attempt):
            self._announce("STARTING", "starting its process")
        if lease.is_with_engines(self._paths, attempt):
            return True
        if self._member.state != "WAITING":
            self._announce("WAITING", "for the trainer to lend its GPUs")
        return False

    def _progress(self, phase: str) -> None:
        if self._stopping.is_set():
            raise _Stopped
        if lost := self._parts.end(self._member.start):
            raise EngineError(f"it {lost}")
        if phase != self._member.reason:
            self._announce("STARTING", phase)

    def _serve(self, engine: EngineProcess) -> str | None:
        """Announces a healthy engine and watches it; returns as `_live` does."""
        hang_s = self._hosting.hang_timeout_s
        try:
            able = capabilities.probe(
                engine.url, engine.token, timeout_s=hang_s, model_path=self._spec.model_path
            )
            self._check_memory(able)
        except EngineError as error:
            return f"answered /health and then failed: {error}"
        if self._hosting.recomputes:
            check_recompute(
                self._spec.args, flushes_paused=able.flushes_paused, version=able.version
            )
        self._member = self._member._replace(url=engine.url)
        if self._hosting.loads_itself:
            self._puller = Puller(self._hosting, self._paths, self._events)
        if failed := self._pull(engine):
            return failed
        self._announce("DRAINING" if self._draining else "HEALTHY")
        self._events.emit(
            "engine", url=engine.url, engine_pid=engine.pid, kind=able.engine,
            version=able.version, id=self._slot.id, start=self._member.start,
            start_s=round(engine.age_s, 2),
        )  # fmt: skip
        self._healthy.set()
        every_s = min(5.0, hang_s / 4)
        with Pulse(engine.url, engine.token, every_s=every_s, timeout_s=hang_s) as pulse:
            return self._watch(engine, pulse)

    def _check_memory(self, able: Capabilities) -> None:
        shared = self._hosting.shares_gpus and self._hosting.on_gpus
        if shared and not able.memory_saver:
            raise EngineError(
                f"{able.engine} {able.version} cannot release its memory, and shares its GPUs with "
                "the trainer; it needs torch_memory_saver"
            )

    def _watch(self, engine: EngineProcess, pulse: Pulse) -> str | None:
        read_roster = 0.0
        while not self._stopping.wait(_WATCH_S):
            if end := engine.end():
                said = ": ".join(filter(None, [f"{end} while serving", engine.cause()]))
                return f"{said}\n{engine.last_lines()}"
            if time.monotonic() >= read_roster:
                read_roster = time.monotonic() + _ROSTER_S
                entry = self._entry(self._roster())
                if entry and entry.state == "SYNCING":  # it need not answer
                    pulse.excuse()
                if why := _fenced(entry) or self._parts.end(self._member.start):
                    return why
            if failed := self._pull(engine, pulse):
                return failed
            if (silent_s := pulse.silent_s) > self._hosting.hang_timeout_s:
                where = engine.whereabouts()
                engine.stop(_HUNG_GRACE_S)
                return (
                    f"hangs: {engine} has said nothing for {silent_s:.0f} s, and no update is "
                    f"under way (engines.{self._spec.pool}.hang_timeout_s); {where}\n"
                    f"{engine.last_lines()}"
                )
        return None

    def _pull(self, engine: EngineProcess, pulse: Pulse | None = None) -> str | None:
        """Has it load the newest snapshot, if that is not the trainer's to do.

        Returns:
            Why its weights are undefined; None if they are not.
        """
        newest = self._puller.due() if self._puller else None
        if self._puller is None or newest is None:
            return None
        try:
            self._member = self._puller.pull(self._member, engine.url, engine.token, newest)
        except EngineError as error:
            return str(error)
        if pulse:
            pulse.excuse()
            self._announce("DRAINING" if self._draining else "HEALTHY")
        return None

    def _entry(self, held: Roster | None) -> RosterEntry | None:
        """Returns the roster's entry of this very start."""
        entry = held.members.get(self._slot.id) if held else None
        return entry if entry and entry.start == self._member.start else None

    def _new_member(self, start: int) -> Member:
        kind, context = self._spec.kind, self._context
        return Member(
            id=self._slot.id,
            start=f"{context.attempt}-{context.start}-{start}",
            url="",
            num_ranks=self._hosting.num_ranks,
            engine=kind,
            state="STARTING",
            transport=self._hosting.transport,
            lane=self._lane,
            pool=self._spec.pool,
        )

    @property
    def _lane(self) -> int:
        """Engines lie on the trainer's GPUs side by side, in the order of its ranks."""
        return self._slot.number * self._hosting.num_ranks if self._hosting.shares_gpus else -1

    def _announce(self, state: State, reason: str = "") -> None:
        with self._announcing:
            self._member = self._member._replace(state=state, reason=reason)
            members.announce(self._paths, self._member)


def _fenced(entry: RosterEntry | None) -> str | None:
    """Why the weights are undefined; None if they are not."""
    return f"was fenced: {entry.reason}" if entry and entry.state == "FENCED" else None


def _in_short(error: BaseException) -> str:
    """Returns what happened, and the last line of the engine's log if it comes with the error."""
    first, *log_lines = str(error).splitlines() or [repr(error)]
    return f"{first} {log_lines[-1].strip()}" if log_lines else first


class _Stopped(Exception):  # noqa: N818
    """The engine is to be stopped before it has started."""
