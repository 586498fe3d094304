"""Brings a new policy version to every engine: pause in place, deliver, resume.

Rank 0 of the trainer decides, whatever the transport. An engine that fails an update holds
undefined weights. It is fenced, that is left out and never resumed, until it starts anew.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from typing import NamedTuple

import torch
from torch import Tensor

from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import EngineError, SnapshotError
from relax_hpc.inference import switches
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.members import MEMORY, EngineRegistry, Engines, Member
from relax_hpc.runtime.comm.bucket import BucketPlan
from relax_hpc.runtime.comm.torch_group import GroupBackend
from relax_hpc.runtime.telemetry.timers import Phase, Timers
from relax_hpc.weights.broadcast import CollectiveTransport
from relax_hpc.weights.files import FileTransport, Loaded, Loads
from relax_hpc.weights.meeting.invitation import Carrier
from relax_hpc.weights.same_gpu import LaneLink, LaneTransport
from relax_hpc.weights.staging import Buffers, Gather, Outgoing
from relax_hpc.weights.transport import (
    WAYS,
    Delivery,
    DigestComparison,
    Receipts,
    Rest,
    TrainerRanks,
    Transport,
    Update,
    Way,
    compare,
    each,
)

log = logging.getLogger(__name__)

_BUFFERS = 2
RETRY_S = 30.0
"""Time for which a failed transport is not retried."""
_THREADS = 1 << 14
"""Limit: during an update one thread waits for every engine. Threads start when needed."""


class Published(NamedTuple):
    version: int
    members: list[str]
    fenced: list[str]
    again: bool
    """Whether members remain that need a further publication."""
    num_bytes: int
    pause_seconds: float
    seconds: dict[str, float]
    """Time from the first gathered tensor to the last engine that resumed, and its parts."""
    verified: DigestComparison | None
    transport: Way | None = None
    """The way that was served; None if every engine present holds the version."""
    error: str = ""
    """Reason why no engine can be served in this way at present."""
    phases: Sequence[Phase] = ()
    invited: Mapping[str, str] = {}
    """Member -> how it was invited into the group, if that was formed now, and why not better."""
    loading: Sequence[str] = ()
    """Members that have begun to load by themselves; see `Publisher.take_ended_loads`."""


class Publisher:
    """Lives in rank 0 of the trainer and tells the other ranks what to do."""

    def __init__(
        self,
        config: WeightsConfig,
        register: EngineRegistry,
        plan: BucketPlan,
        *,
        device: torch.device,
        ranks: TrainerRanks,
        link: LaneLink | None = None,
        gather: Gather | None = None,
        waits_for_loads: bool = True,
        carriers: Callable[[ThreadPoolExecutor], Sequence[Carrier]] = lambda _: (),
    ) -> None:
        """Serves the members in `register`, whether or not they are there yet.

        Args:
            ranks: of the trainer; the others do what this publisher says.
            link: to members on the trainer's own GPUs, if any.
            gather: brings whole buckets here, which is faster than single tensors.
            waits_for_loads: whether a publication ends when members have loaded their files, rather
                than when they have begun to.
        """
        self._config, self._register = config, register
        self._notes = switches.Notes(register.paths)
        self._ranks, self._link, self._gather = ranks, link, gather
        self._buffers = link.buffers if link else Buffers(plan, device, count=_BUFFERS)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights")
        self._carriers = () if link else carriers(self._threads)
        self._loads = Loads(register, config.advanced.timeout_s)
        self._waits_for_loads = waits_for_loads
        self._transports = dict[Way, Transport]()
        self._failing_since, self._not_before = dict[Way, float](), dict[Way, float]()
        self._next_look = 0.0

    def publish(
        self,
        version: int,
        tensors: Iterator[tuple[str, Tensor]],
        *,
        check: bool = False,
        check_fenced: Callable[[], None] = lambda: None,
    ) -> Published:
        """Brings every healthy member of one way to `version`.

        If there are members of several ways, the result says `again`: call it for the next way.

        Args:
            tensors: all of its weights, not started yet.
            check: compares afterwards what members hold with what was sent.
            check_fenced: raises if another trainer took over. Called before members are changed,
                and before the roster is published.

        Raises:
            FencedError: another trainer took over.
            SnapshotError: engines take files only, and none could be written for `timeout_s`.
        """
        register, timers, start = self._register, Timers(), time.perf_counter()
        register.tell_torn(check_fenced)
        register.version = version
        self._loads.expire()
        live = self._candidates()
        way = next(iter(self._open(live)), None)
        engines = {m: r for m, r in live.items() if self._way_of(m) == way}
        outgoing = self._outgoing(way, engines, tensors, check=check)
        done, delivery, error = Engines(), None, ""
        try:
            if way:
                update = Update(version, outgoing, timers, check)
                done, delivery = self._sync(way, engines, update, check_fenced)
            else:
                self._ranks.tell(Rest())
        except SnapshotError as problem:
            assert way
            error = self._suspend(way, problem)
        finally:
            end = time.perf_counter()
            if way:
                self._transport(way).settle(outgoing)
        verified = None
        if delivery:
            if not delivery.begun:
                _add_times(timers, delivery.receipts)
            if check and done:
                verified = compare(done, delivery.sent, delivery.receipts)
        begun = delivery.begun if delivery else ()
        fenced = [m.id for m in live if register.state(m) == "FENCED" and m not in begun]
        return Published(
            version,
            sorted(member.id for member in done),
            sorted(fenced),
            again=bool(self._open(live)),
            num_bytes=outgoing.num_bytes,
            pause_seconds=_measure_pause(timers),
            seconds={"total": end - start} | _plain(timers),
            verified=verified,
            transport=way,
            error=error,
            phases=timers.phases,
            invited=delivery.invited if delivery else {},
            loading=sorted(member.id for member in begun),
        )

    def has_newcomers(self, *, every_s: float = 1.0) -> bool:
        """Whether an engine is there that does not hold the current version. Cheap.

        Without this, a restarted engine would wait for the next version, and the trainer for the
        batch that only this engine can sample.
        """
        register = self._register
        if register.version < 0 or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + every_s
        self._loads.expire()
        if not any(map(self._lacks, register.list_healthy())):
            return False
        return bool(self._open(self._candidates()))

    def take_ended_loads(self) -> list[Loaded]:
        """Returns the loads of earlier publications that ended since the last call."""
        return self._loads.take_ended()

    def wait_for_loads(self) -> bool:
        """Waits until no member is loading.

        Returns:
            Whether some members still need the version, in a further publication.
        """
        return self._loads.wait() and bool(self._open(self._candidates()))

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()
        self._threads.shutdown(wait=False)

    def _outgoing(
        self,
        way: Way | None,
        members: Collection[Member],
        tensors: Iterator[tuple[str, Tensor]],
        *,
        check: bool,
    ) -> Outgoing:
        by_name = check and any(
            member.engine == "embedded" and not self._transport(way).leaves_receipts(member)
            for member in members
            if way
        )
        gather = self._gather if way in ("lanes", "collective") else None
        # A check compares everything, so everything is sent.
        fixed = self._buffers.plan.fixed
        asleep = any(self._register.lacks(member, MEMORY[0]) for member in members)
        can_skip = way and not check and not asleep and self._transport(way).holds_fixed(members)
        skipped = fixed if can_skip else ()
        return Outgoing(
            self._buffers, tensors, gather, digest=by_name, fingerprints=check, skipped=skipped
        )

    def _way_of(self, member: Member) -> Way:
        return "lanes" if self._link and member.lane >= 0 else member.transport

    def _transport(self, way: Way) -> Transport:
        if way not in self._transports:
            self._transports[way] = self._make_transport(way)
        return self._transports[way]

    def _make_transport(self, way: Way) -> Transport:
        config, paths, threads = self._config, self._register.paths, self._threads
        if way == "files":
            loads = None if self._waits_for_loads else self._loads
            return FileTransport(config, threads, self._ranks, self._notes, loads)
        if way == "lanes":
            assert self._link
            return LaneTransport(self._link, threads, self._ranks)
        backend: GroupBackend = "nccl" if self._buffers.device.type == "cuda" else "gloo"
        return CollectiveTransport(
            config, paths, threads, self._ranks, self._buffers.plan, backend, self._carriers
        )

    def _open(self, live: Iterable[Member]) -> list[Way]:
        """Returns the ways that still have members to serve, fastest first."""
        wanted = {self._way_of(member) for member in live if self._lacks(member)}
        now = time.monotonic()
        return [way for way in WAYS if way in wanted and now >= self._not_before.get(way, now)]

    def _suspend(self, way: Way, problem: SnapshotError) -> str:
        """Leaves a way unused for a while; engines that take no other keep their weights.

        Raises:
            SnapshotError: it has failed for long, and no engine is left to sample.
        """
        now = time.monotonic()
        self._not_before[way] = now + RETRY_S
        since = self._failing_since.setdefault(way, now)
        register = self._register
        if (
            now - since > self._config.advanced.timeout_s
            and register.version not in register.holds()
        ):
            raise problem
        log.error("%s; engines keep what they have; tried again in %.0f s", problem, RETRY_S)
        return str(problem)

    def _lacks(self, member: Member) -> bool:
        """Whether it needs the version and is not getting it already."""
        # In this order: what the register says is true as soon as it does not load any more.
        return not self._loads.has(member) and not self._register.is_current(member)

    def _candidates(self) -> Engines:
        """Returns the members that answer, do not load, and are not ahead of this trainer.

        After a restart from a checkpoint, engines hold a policy that this trainer has yet to make
        again. Going back would give their running requests older tokens than `max_staleness`
        allows, so they wait until the trainer has caught up. Members that the previous trainer was
        updating when it died are fenced, see `EngineRegistry`. So the version of an engine never
        falls between its start and its end.
        """
        live = self._register.live(self._threads, without=self._loads.has)
        return {m: r for m, r in live.items() if self._is_due(m, r)}

    def _is_due(self, member: Member, receiver: EngineClient) -> bool:
        if self._register.state(member):
            return True
        try:
            return receiver.version() <= self._register.version
        except EngineError:
            return False  # it died a moment ago

    def _sync(
        self,
        way: Way,
        engines: Engines,
        update: Update,
        check_fenced: Callable[[], None],
    ) -> tuple[Engines, Delivery]:
        """Returns the members that hold the version and have resumed, and its transport."""
        transport, register, timers = self._transport(way), self._register, update.timers
        transport.stage(update)
        self._failing_since.pop(way, None)
        if way == "files":  # each for itself, so those that have it are left alone
            engines = {m: r for m, r in engines.items() if self._lacks(m)}
        for member in engines:
            register.note(member, "SYNCING")
        check_fenced()
        register.write()
        delivery = Delivery()
        # Where each goes on by itself it needs all of its memory before.
        first = MEMORY if way == "files" else MEMORY[:1]
        if awake := self._with_memory(first, engines, timers):
            delivery = transport.deliver(awake, update)
        done, silent = self._with_memory(MEMORY, delivery.taken, timers), dict[Member, str]()
        if not delivery.resumed:
            with timers("resume"):
                done, silent = each(
                    self._threads,
                    done,
                    lambda engine: engine.resume(),
                    self._config.advanced.timeout_s,
                )
        for member, reason in (delivery.failed | silent).items():
            register.fence(member, reason)
        for member in done:
            register.note(member, "ACTIVE")
        if not delivery.resumed:
            self._note_switches(done, delivery.receipts)
        check_fenced()
        register.write()  # those that are to be given it again stay SYNCING until then
        return done, delivery

    def _note_switches(self, done: Iterable[Member], receipts: Receipts) -> None:
        version = self._register.version
        notes = [
            self._threads.submit(self._notes.note, member, version, receipts.get(member, ()))
            for member in done
            if member.takes_orders
        ]
        for note in notes:
            note.result()

    def _with_memory(self, tags: Sequence[str], engines: Engines, timers: Timers) -> Engines:
        """Has members take released memory back; fences those that fail."""
        for tag in tags:
            asleep = {m: r for m, r in engines.items() if self._register.lacks(m, tag)}
            if not asleep:
                continue
            resume = methodcaller("resume_memory", [tag])
            with timers(f"wake_{tag}"):
                woken, failed = each(self._threads, asleep, resume, self._config.advanced.timeout_s)
            for member in woken:
                self._register.note_back(member, tag)
            for member, reason in failed.items():
                self._register.fence(member, reason)
            engines = {m: r for m, r in engines.items() if m not in failed}
        return engines


def _plain(timers: Timers) -> dict[str, float]:
    return {name.removeprefix("time/"): seconds for name, seconds in timers.seconds.items()}


def _add_times(timers: Timers, receipts: Receipts) -> None:
    """Adds the times of the slowest rank of any engine."""
    ranks = [rank for ranks in receipts.values() for rank in ranks]
    for name, field in (("idle", "idle"), ("received", "wire"), ("load", "load")):
        spent = max((getattr(rank, f"{field}_seconds") for rank in ranks), default=0.0)
        timers.seconds.setdefault(f"time/{name}", spent)


def _measure_pause(timers: Timers) -> float:
    """Returns how long engines were paused; loading is part of `wire` if there is one."""
    spent = _plain(timers)
    parts = ("pause", "prepare", "wire" if "wire" in spent else "load", "resume")
    return sum(spent.get(part, 0.0) for part in parts)
