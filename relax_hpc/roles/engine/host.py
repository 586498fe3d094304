"""Keeps the engines of a task running: starts, announces and watches each, and restarts it.

A thread per engine owns it, and the engine dies with the thread. The role's own loop continues
meanwhile: it reads in the member record whether the engine is there, and waits or uses another.

An engine over several nodes has a part in a task per node; the first one is its host. They meet
through the run directory. For every start the host writes a call with its name and the address
where the parts' ranks meet. A part that ends records it, and the host then calls for another start.
"""

import asyncio
import itertools
import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from relax_hpc.config.engines import ROLLOUT, EnginePool, follows_policy
from relax_hpc.config.rollout import TransportName
from relax_hpc.config.run import RESTART_DELAYS_S, RESTART_WINDOW_S, RunConfig, engines_of
from relax_hpc.errors import EngineError, EngineUnfitError, PeerTimeoutError, RelaxError
from relax_hpc.inference import capabilities, members, switches
from relax_hpc.inference.capabilities import Capabilities
from relax_hpc.inference.client import EngineClient, Pulse
from relax_hpc.inference.members import Member, State
from relax_hpc.inference.process import EngineProcess, start_engine
from relax_hpc.inference.sglang.launch import check_recompute, size_of
from relax_hpc.inference.spec import ALONE, EngineSpec, NodeShare
from relax_hpc.roles.context import TaskContext
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.comm.address import hold_port, node_address, with_port
from relax_hpc.runtime.comm.mpi_door import find_launcher
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.sections import PassThrough
from relax_hpc.weights.meeting.attendant import Attendant, Hearing
from relax_hpc.weights.pull_snapshot import Puller

log = logging.getLogger(__name__)

_WATCH_S = 0.5
_POLL_S = 0.5
_ROSTER_S = 1.0
_HUNG_GRACE_S = 1.0
_FOR_GOOD = re.compile(r"No module named|\bConfigError: ")
"""Errors that would recur however often the process is restarted."""


class EngineSlot(NamedTuple):
    """An engine of a task, and its place on the node."""

    id: str
    number: int
    """Number among the engines of its pool; seeds its random numbers."""
    local_index: int
    """Number among the engines of its node; selects its GPUs."""
    part: int = 0
    """Part of an engine over several nodes; 0 is its host."""


Attendance = Hearing | Literal["none"]


def attendance(config: RunConfig, pool: EnginePool, transport: TransportName | None) -> Attendance:
    """Returns how a task with engines that get weights hears invitations."""
    if pool.placement == "actor" or (transport or config.weights.transport) != "collective":
        return "none"
    bootstrap = config.launch.advanced.bootstrap
    if bootstrap in ("files", "mpi_job"):
        return bootstrap
    return "mpi" if bootstrap != "http" and find_launcher() else "none"


def task_name(context: TaskContext) -> str:
    return f"{context.name}/{context.attempt}-{context.start}"


@dataclass(frozen=True, slots=True)
class Hosting:
    """The settings for keeping one engine of a pool."""

    spec: EngineSpec
    slot: EngineSlot
    shares_gpus: bool
    """Whether it computes on the trainer's GPUs, while it has their lease."""
    on_gpus: bool
    hang_timeout_s: float
    max_restarts: int
    peer_timeout_s: float
    transport: TransportName
    recomputes: bool
    """Whether an update drops the key-value cache."""
    attends: Attendance = "none"
    """How its task hears invitations into weight groups."""
    loads_itself: bool = False
    """Whether its task, not the trainer, has it load the newest snapshot."""
    update_timeout_s: float = math.inf
    """Limit of such a load."""

    @property
    def num_ranks(self) -> int:
        return 1 if self.spec.kind == "embedded" else size_of(self.spec.args).gpus

    def least_gpus(self, context: TaskContext) -> int:
        own = self.num_ranks // self.spec.nodes if self.on_gpus else 0
        return max(context.gpus, own)


def slots_of(pool: EnginePool, context: TaskContext) -> list[EngineSlot]:
    """Returns the engines of a task: one, several, or one part of an engine over several tasks.

    Parts of an engine have consecutive ranks, since Slurm fills nodes in order of rank.
    """
    task, part = divmod(context.rank, pool.nodes_per_engine)
    count = pool.engines_per_task
    return [
        EngineSlot(name, task * count + index, context.local_rank * count + index, part)
        for index, name in enumerate(engines_of(f"{context.component}-{task}", count))
    ]


def hosting_of(
    config: RunConfig, slot: EngineSlot, name: str = ROLLOUT, transport: TransportName | None = None
) -> Hosting:
    pool = config.engines[name]
    follows = follows_policy(name)
    return Hosting(
        spec_of(config, slot, name),
        slot,
        shares_gpus=pool.placement == "actor",
        on_gpus=pool.resources.gpus_per_node > 0,
        hang_timeout_s=pool.advanced.hang_timeout_s,
        max_restarts=config.launch.max_restarts,
        peer_timeout_s=config.launch.advanced.peer_timeout_s,
        transport=transport or config.weights.transport,
        recomputes=follows and config.weights.advanced.kv_cache == "recompute",
        attends=attendance(config, pool, transport) if follows else "none",
        loads_itself=follows and config.launch.layout == "separate",
        update_timeout_s=config.weights.advanced.timeout_s,
    )


def spec_of(config: RunConfig, slot: EngineSlot, name: str = ROLLOUT) -> EngineSpec:
    pool = config.engines[name]
    follows = follows_policy(name)
    return EngineSpec(
        pool.kind,
        pool.model or config.model.path,
        config.model.dtype,
        args_on_own_gpus(pool, slot),
        seed=config.seed + slot.number,
        max_running_requests=pool.max_running_requests,
        start_timeout_s=pool.advanced.start_timeout_s,
        nodes=pool.nodes_per_engine,
        routed_experts=follows and config.replays_routing,
        quantization=config.weights.quantization_config if follows else None,
        pool=name,
    )


def args_on_own_gpus(pool: EnginePool, slot: EngineSlot) -> PassThrough:
    """Returns the engine's arguments with its first GPU.

    Engines of one node take consecutive GPUs, or share them with their neighbours; Slurm shows all
    GPUs to each of them.
    """
    if pool.kind != "sglang" or not pool.resources.gpus_per_node:
        return pool.args
    per_node = size_of(pool.args).gpus // pool.nodes_per_engine
    own: PassThrough = {"base_gpu_id": slot.local_index // pool.advanced.engines_per_gpu * per_node}
    if pool.placement == "actor":
        own["enable_memory_saver"] = True
    return own | pool.args


class HostCall(NamedTuple):
    """Order of an engine's host to its other parts."""

    start: str
    address: str
    """Meeting place of the ranks of that start, "host:port"."""
    over: bool
    """The engine will not be started again."""


class Parts:
    """The other parts of an engine, as its host sees them; does nothing if there are none."""

    def __init__(self, paths: RunPaths, engine: str, nodes: int) -> None:
        self._paths, self._engine, self._nodes = paths, engine, nodes

    @contextmanager
    def call(self, start: str) -> Iterator[NodeShare]:
        """Calls for a start, and holds the port where its ranks meet during the block.

        Yields:
            The host's own share.
        """
        if self._nodes == 1:
            yield ALONE
            return
        host = node_address()
        with hold_port(host) as port:
            call = HostCall(start, with_port(host, port), over=False)
            write_json(self._paths.engine_call(self._engine), call._asdict())
            yield NodeShare(self._nodes, 0, call.address)

    def end(self, start: str) -> str:
        """Returns why a part ended in that start; "" if none did."""
        for part in range(1, self._nodes):
            record = read_json(self._paths.engine_part(self._engine, part))
            if record is not None and record["start"] == start:
                return f"lost part {part} on {record['node']}: it {record['reason']}"
        return ""

    def dismiss(self, start: str) -> None:
        """Lets their tasks end; `start` is the last one."""
        if self._nodes > 1:
            call = HostCall(start, "", over=True)
            write_json(self._paths.engine_call(self._engine), call._asdict())


def serve_part(
    hosting: Hosting, paths: RunPaths, context: TaskContext, events: EventWriter
) -> None:
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

    def call(self) -> HostCall | None:
        record = read_json(self._paths.engine_call(self._slot.id))
        call = HostCall(**record) if record else None
        return call if call and call.start.startswith(self._prefix) else None

    def next_call(self, after: str) -> HostCall:
        deadline = time.monotonic() + self._hosting.peer_timeout_s
        while (call := self.call()) is None or (not call.over and call.start == after):
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"the host of {self._slot.id} called for no start within "
                    f"{self._hosting.peer_timeout_s} s after {after or 'its own'}"
                )
            time.sleep(_POLL_S)
        return call

    def report(self, call: HostCall, reason: str) -> None:
        path = self._paths.engine_part(self._slot.id, self._slot.part)
        first_line = reason.splitlines()[0]
        write_json(path, {"start": call.start, "node": self._context.node, "reason": first_line})

    def run(self, call: HostCall) -> str | None:
        """Runs one start to its end. Returns why it ended, or None if the host calls for
        another."""

        def check(phase: str) -> None:
            if self.call() != call:
                raise _Stopped

        slot, spec = self._slot, self._hosting.spec
        try:
            engine = start_engine(
                spec,
                host=node_address(),
                token=secrets.token_hex(16),
                log_path=self._paths.engine_log(f"{slot.id}.part{slot.part}", call.start),
                share=NodeShare(spec.nodes, slot.part, call.address),
                least_gpus=self._hosting.least_gpus(self._context),
                progress=check,
            )
        except _Stopped:
            return None
        except EngineError as error:
            return f"did not start: {error}"
        with engine:
            while self.call() == call:
                if end := engine.end():
                    return f"{end}\n{engine.last_lines()}"
                time.sleep(_POLL_S)
        return None


class EngineHost:
    """One engine of a task, from its first start to a clean stop. A context manager."""

    def __init__(
        self, hosting: Hosting, paths: RunPaths, context: TaskContext, events: EventWriter
    ) -> None:
        self._hosting, self._paths, self._context = hosting, paths, context
        self._slot, self._spec, self._events = hosting.slot, hosting.spec, events
        self._roster = members.follow_roster(paths)
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
        """Stops the engine and marks it GONE, unless it FAILED before."""
        self.ask_to_stop()
        self._thread.shutdown(wait=True)

    def ask_to_stop(self) -> None:
        """Starts a stop, so that several engines stop concurrently; leaving the context waits for
        it."""
        self._stopping.set()

    @property
    def id(self) -> str:
        return self._slot.id

    @property
    def attends(self) -> Attendance:
        return self._hosting.attends

    def attendant(self, way: Hearing, client: Callable[[str, str], EngineClient]) -> Attendant:
        """Returns one for all engines of the task."""
        return Attendant(self._paths, task_name(self._context), self._secret, way, client)

    def client(self, start: str) -> EngineClient:
        """Returns a client of a start of the engine.

        Raises:
            EngineError: that start is over, or not healthy.
        """
        member = self._member
        if member.start != start or not member.url:
            raise EngineError(f"start {start} of {member.id} is over, or not yet there")
        timeout_s = self._hosting.update_timeout_s
        return EngineClient(member.url, self.token, timeout_s=timeout_s)

    @property
    def token(self) -> str:
        return self._secret.engine_token(self._member.id, self._member.start)

    def wait_until_healthy(self) -> None:
        """Blocks until the engine is healthy for the first time.

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
            EngineError: it will not come back by itself, so the role has to end.
        """
        assert self._life is not None
        await asyncio.shield(asyncio.wrap_future(self._life))

    def drain(self) -> None:
        """Announces that the engine gets no new requests; the caller stops it."""
        self._draining = True
        self._announce("DRAINING")

    def _keep(self) -> None:
        """Restarts the engine until it is stopped or has failed too often."""
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
        """Runs one start of the engine, to its end.

        Returns:
            Why it ended; None if it was stopped.

        Raises:
            EngineError: the very first start failed, which points to the job rather than to bad
                luck. (Over several nodes, ports cannot all be held: luck plays a part.)
            EngineUnfitError: likewise, and the task's next start would fail as well.
            ConfigError: requested GPUs are missing.
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
        with self._parts.call(self._member.start) as share:
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
        """Whether the engine may take memory of its GPUs; for shared ones see
        `inference.members`."""
        if self._stopping.is_set():
            raise _Stopped
        if not self._hosting.shares_gpus:
            return True
        attempt = self._context.attempt
        if self._member.state == "WAITING" and members.is_with_engines(self._paths, attempt):
            self._announce("STARTING", "starting its process")
        if members.is_with_engines(self._paths, attempt):
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
            self._puller = Puller(
                self._paths, self._events, timeout_s=self._hosting.update_timeout_s
            )
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
                held = self._roster()
                entry = held.entry(self._slot.id, self._member.start) if held else None
                if entry and entry.state == "SYNCING":  # it need not answer
                    pulse.excuse()
                if entry and entry.state == "FENCED":
                    return f"was fenced: {entry.reason}"
                if lost := self._parts.end(self._member.start):
                    return lost
            if failed := self._pull(engine, pulse):
                return failed
            if (silent_s := pulse.silent_s) > self._hosting.hang_timeout_s:
                where = engine.whereabouts()
                engine.stop(_HUNG_GRACE_S)
                return (
                    f"hangs: {engine} has said nothing for {silent_s:.0f} s, and no update is "
                    f"under way (engines.{self._spec.pool}.advanced.hang_timeout_s); {where}\n"
                    f"{engine.last_lines()}"
                )
        return None

    def _pull(self, engine: EngineProcess, pulse: Pulse | None = None) -> str | None:
        """Has it load the newest snapshot, unless the trainer does that.

        Returns:
            Why its weights are undefined; None if they are not.
        """
        newest = self._puller.due() if self._puller else None
        if self._puller is None or newest is None:
            return None
        client = EngineClient(
            engine.url,
            engine.token,
            timeout_s=self._hosting.update_timeout_s,
            recompute=self._hosting.recomputes,
            has_prefix_cache=not self._spec.args.get("disable_radix_cache"),
        )
        try:
            with client:
                self._member = self._puller.pull(client, self._member, newest)
        except EngineError as error:
            return str(error)
        if pulse:
            pulse.excuse()
            self._announce("DRAINING" if self._draining else "HEALTHY")
        return None

    def _new_member(self, start: int) -> Member:
        hosting, context = self._hosting, self._context
        # Those of the trainer's ranks, in order; see `weights.same_gpu`.
        lane = self._slot.number * hosting.num_ranks if hosting.shares_gpus else -1
        return Member(
            id=self._slot.id,
            start=f"{context.attempt}-{context.start}-{start}",
            url="",
            num_ranks=hosting.num_ranks,
            engine=self._spec.kind,
            state="STARTING",
            transport=hosting.transport,
            lane=lane,
            pool=self._spec.pool,
            task="" if hosting.attends == "none" else task_name(context),
        )

    def _announce(self, state: State, reason: str = "") -> None:
        with self._announcing:
            self._member = self._member._replace(state=state, reason=reason)
            members.announce(self._paths, self._member)


def _in_short(error: BaseException) -> str:
    first, *log_lines = str(error).splitlines() or [repr(error)]
    return f"{first} {log_lines[-1].strip()}" if log_lines else first


class _Stopped(Exception):  # noqa: N818
    """The engine was stopped, or called off by its host, before it had started."""


BEAT_S = 1.0
_STILL_S = 1.5
"""Blocking the event loop for longer than this is logged."""
_SAID_S = 60.0
"""Seconds between two such warnings."""


@contextmanager
def hold_engines(made: Iterable[EngineHost]) -> Iterator[list[EngineHost]]:
    """Starts all engines concurrently, and stops them likewise."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(host) for host in made]
        stack.enter_context(attend(hosts))
        try:
            yield hosts
        finally:
            for host in hosts:
                host.ask_to_stop()


@contextmanager
def attend(hosts: Sequence[EngineHost]) -> Iterator[None]:
    """Hears invitations into weight groups for these engines of one task during the block."""
    if not hosts or (way := hosts[0].attends) == "none":
        yield
        return
    by_id = {host.id: host for host in hosts}

    def client(member: str, start: str) -> EngineClient:
        if member not in by_id:
            raise EngineError(f"is no engine of this task, but {', '.join(by_id)} are")
        return by_id[member].client(start)

    with hosts[0].attendant(way, client):
        yield


async def _beat() -> None:
    """Records a heartbeat of the event loop, and warns if it blocks."""
    said = -math.inf
    while True:
        heartbeat.beat()
        begin = time.monotonic()
        await asyncio.sleep(BEAT_S)
        late = time.monotonic() - begin - BEAT_S
        if late > _STILL_S and begin > said + _SAID_S:
            said = begin
            log.warning(
                "the event loop of this task stood still for %.1f s, and all of its episodes: "
                "an environment, or what else is called in it, waits without `await`; use "
                "asyncio.sleep, an asynchronous client or asyncio.to_thread",
                late,
            )


async def while_kept(hosts: Sequence[EngineHost], loop: Coroutine[Any, Any, None]) -> None:
    """Runs the loop to its end; ends it early if an engine does not come back.

    Raises:
        RelaxError: the loop was cancelled from within.
    """
    running = asyncio.ensure_future(loop)
    failures = [asyncio.ensure_future(host.failure()) for host in hosts]
    beating = asyncio.ensure_future(_beat())
    with heartbeat.phase("loop"):
        await asyncio.wait({running, *failures}, return_when=asyncio.FIRST_COMPLETED)
    beating.cancel()
    cancelled_itself = running.done() and running.cancelled()
    for task in (running, *failures):
        if not task.done():
            task.cancel()
    # The loop may have failed because an engine did, so what its host says comes first.
    for outcome in await asyncio.gather(*failures, running, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
    if cancelled_itself:  # its work is not done
        raise RelaxError("the loop of the task was cancelled by something that it had called")
