"""Policy v becomes v + 1 in every engine: pause in place, deliver, resume.

Rank 0 of the trainer decides, whatever the transport. An engine that fails an update holds
undefined weights: it is fenced (left out, and never resumed) until it comes back as another start.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from relax_hpc.comm.broadcast import Transport as Backend
from relax_hpc.comm.bucket import BucketPlan
from relax_hpc.comm.orders import Receipt
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import EngineError, SnapshotError
from relax_hpc.fleet import switches
from relax_hpc.fleet.control import EngineControl
from relax_hpc.fleet.members import Member
from relax_hpc.fleet.register import MEMORY, Register
from relax_hpc.telemetry.timers import Phase, Timers
from relax_hpc.weights.collective import CollectiveTransport
from relax_hpc.weights.files import FileTransport
from relax_hpc.weights.lanes import LaneLink, LaneTransport
from relax_hpc.weights.loads import Loaded, Loads
from relax_hpc.weights.ranks import Rest, TrainerRanks
from relax_hpc.weights.staging import Buffers, Gather, Outgoing
from relax_hpc.weights.transport import WAYS, Delivery, Transport, Way, each
from relax_hpc.weights.verify import Sent, Verified, compare

log = logging.getLogger(__name__)

_BUFFERS = 2
RETRY_S = 30.0
"""Pause after a transport was found to be of no use."""
_THREADS = 1 << 14
"""Limit; one thread waits for every engine during an update, and engines for each other. They are
started when needed."""


class Published(NamedTuple):
    """The outcome of one publication."""

    version: int
    members: list[str]
    fenced: list[str]
    again: bool
    """Whether members are left that have to be given it in a further publication."""
    num_bytes: int
    pause_seconds: float
    """Time for which engines stood still."""
    seconds: dict[str, float]
    """Time from the first gathered tensor to the last engine that resumed, and the parts of it."""
    verified: Verified | None
    transport: Way | None = None
    """The way that was served; None if every engine that is there holds the version."""
    error: str = ""
    """Reason why no engine could be given it in this way, for the present."""
    phases: Sequence[Phase] = ()
    """The parts, with the times at which they began."""
    loading: Sequence[str] = ()
    """Members that have begun to load it, each by itself; see `Publisher.ended_loads`."""


class Publisher:
    """Lives in rank 0 of the trainer, and tells the other ranks what to do for it."""

    def __init__(
        self,
        config: WeightsConfig,
        register: Register,
        plan: BucketPlan,
        *,
        device: torch.device,
        ranks: TrainerRanks,
        link: LaneLink | None = None,
        gather: Gather | None = None,
        waits_for_loads: bool = True,
    ) -> None:
        """Serves the members in `register`, whether or not they are there yet.

        Args:
            config: deadlines.
            register: nobody else changes it during an update.
            plan: of what engines get: which tensors travel together, in which order.
            device: where these tensors are.
            ranks: of the trainer; the others do what this publisher says.
            link: to members on the trainer's own GPUs, if that is where they are.
            gather: brings buckets of the plan here, which is quicker than to take tensors one by
                one.
            waits_for_loads: a publication ends when members have loaded their files, and not when
                they have begun to.
        """
        self._config, self._register = config, register
        self._notes = switches.Notes(register.paths)
        self._ranks, self._link, self._gather = ranks, link, gather
        self._buffers = link.buffers if link else Buffers(plan, device, count=_BUFFERS)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights")
        self._loads = Loads(register, config.timeout_s)
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
        """Brings every healthy member that takes weights in one way to `version`.

        If there are members of several ways, it is to be called `again`, for the next of them.

        Args:
            version: of the policy.
            tensors: all of its weights, which nobody has begun to take.
            check: compares afterwards what members hold with what was sent.
            check_fenced: raises if another trainer took over; asked before members are changed and
                before it is published what they hold.

        Raises:
            FencedError: another trainer took over.
            SnapshotError: engines take files only, and none could be written for `timeout_s`.
        """
        register, timers, start = self._register, Timers(), time.perf_counter()
        register.version = version
        self._loads.expire()
        live = self._candidates()
        way = next(iter(self._open(live)), None)
        engines = {m: r for m, r in live.items() if self._way_of(m) == way}
        outgoing = self._outgoing(way, engines, tensors, check=check)
        done, delivery, error = dict[Member, EngineControl](), None, ""
        try:
            if way:
                done, delivery = self._sync(
                    way, engines, outgoing, timers, check_fenced, check=check
                )
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
            pause_seconds=_paused(timers),
            seconds={"total": end - start} | _plain(timers),
            verified=verified,
            transport=way,
            error=error,
            phases=timers.phases,
            loading=sorted(member.id for member in begun),
        )

    def has_newcomers(self, *, every_s: float = 1.0) -> bool:
        """Whether an engine is there that does not hold the current version.

        Without asking, a restarted engine would wait for the next version, and the trainer for the
        batch that only this engine can sample. Cheap enough to be called often.
        """
        register = self._register
        if register.version < 0 or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + every_s
        self._loads.expire()
        if not any(map(self._lacks, register.known())):
            return False
        return bool(self._open(self._candidates()))

    def ended_loads(self) -> list[Loaded]:
        """Returns the loads of earlier publications that ended since it was last asked."""
        return self._loads.ended()

    def wait_for_loads(self) -> bool:
        """Returns when no member loads any more.

        Returns:
            Whether some do not hold the version, and have to be given it in a further publication.
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
            return FileTransport(config, threads, self._ranks, loads)
        if way == "lanes":
            assert self._link
            return LaneTransport(self._link, threads, self._ranks)
        backend: Backend = "nccl" if self._buffers.device.type == "cuda" else "gloo"
        return CollectiveTransport(config, paths, threads, self._ranks, self._buffers.plan, backend)

    def _open(self, live: Iterable[Member]) -> list[Way]:
        """Ways in which somebody is still to be given the version, the quickest first."""
        wanted = {self._way_of(member) for member in live if self._lacks(member)}
        now = time.monotonic()
        return [way for way in WAYS if way in wanted and now >= self._not_before.get(way, now)]

    def _suspend(self, way: Way, problem: SnapshotError) -> str:
        """Lets a way be for a while; engines that take no other keep what they have.

        Raises:
            SnapshotError: it has failed for long, and no engine is left to sample.
        """
        now = time.monotonic()
        self._not_before[way] = now + RETRY_S
        since = self._failing_since.setdefault(way, now)
        register = self._register
        if now - since > self._config.timeout_s and register.version not in register.holds():
            raise problem
        log.error("%s; engines keep what they have; tried again in %.0f s", problem, RETRY_S)
        return str(problem)

    def _lacks(self, member: Member) -> bool:
        """Whether it is to be given the version, and does not get it already."""
        # In this order: what the register says is true as soon as it does not load any more.
        return not self._loads.has(member) and not self._register.is_current(member)

    def _candidates(self) -> dict[Member, EngineControl]:
        """Returns the members that could be given the version now."""
        return self._due(self._register.live(self._threads, without=self._loads.has))

    def _due(self, live: dict[Member, EngineControl]) -> dict[Member, EngineControl]:
        """Returns the members that are not ahead of this trainer.

        After a restart from a checkpoint engines hold a policy that this trainer has yet to make
        again. Going back would give their running requests older tokens than `max_staleness`
        allows, so they stay where they are until the trainer has caught up. Not so if the trainer
        before died while it updated them.
        """
        return {m: r for m, r in live.items() if self._is_due(m, r)}

    def _is_due(self, member: Member, receiver: EngineControl) -> bool:
        if self._register.is_torn(member) or self._register.state(member):
            return True
        try:
            return receiver.version() <= self._register.version
        except EngineError:
            return False  # it died a moment ago

    def _sync(
        self,
        way: Way,
        engines: dict[Member, EngineControl],
        outgoing: Outgoing,
        timers: Timers,
        check_fenced: Callable[[], None],
        *,
        check: bool,
    ) -> tuple[dict[Member, EngineControl], Delivery]:
        """Returns the members that hold the version now and go on, and how it got there."""
        transport, register = self._transport(way), self._register
        transport.stage(register.version, outgoing, timers)
        self._failing_since.pop(way, None)
        if way == "files":  # each for itself, so those that have it are left alone
            engines = {m: r for m, r in engines.items() if self._lacks(m)}
        for member in engines:
            register.note(member, "SYNCING")
        check_fenced()
        register.write()
        delivery = Delivery({}, {}, {}, Sent([], ""))
        # Where each goes on by itself it needs all of its memory before.
        first = MEMORY if way == "files" else MEMORY[:1]
        if awake := self._with_memory(first, engines, timers):
            delivery = transport.deliver(awake, register.version, outgoing, timers, check=check)
        done, silent = self._with_memory(MEMORY, delivery.taken, timers), dict[Member, str]()
        if not delivery.resumed:
            with timers("resume"):
                done, silent = each(
                    self._threads, done, lambda engine: engine.resume(), self._config.timeout_s
                )
        for member, reason in (delivery.failed | silent).items():
            register.fence(member, reason)
        for member in done:
            register.note(member, "ACTIVE")
        self._note_switches(done, delivery.receipts)
        check_fenced()
        register.write()  # those that are to be given it again stay SYNCING until then
        return done, delivery

    def _note_switches(self, done: Iterable[Member], receipts: dict[Member, list[Receipt]]) -> None:
        version = self._register.version
        notes = [
            self._threads.submit(self._notes.note, member, version, receipts.get(member, ()))
            for member in done
            if member.takes_orders
        ]
        for note in notes:
            note.result()

    def _with_memory(
        self, tags: Sequence[str], engines: dict[Member, EngineControl], timers: Timers
    ) -> dict[Member, EngineControl]:
        """Gives members that released memory theirs back; fences who does not take it."""
        for tag in tags:
            asleep = {m: r for m, r in engines.items() if self._register.lacks(m, tag)}
            failed = self._resume_memory(tag, asleep, timers) if asleep else {}
            engines = {m: r for m, r in engines.items() if m not in failed}
        return engines

    def _resume_memory(
        self, tag: str, asleep: dict[Member, EngineControl], timers: Timers
    ) -> dict[Member, str]:
        with timers(f"wake_{tag}"):
            woken, failed = each(
                self._threads,
                asleep,
                lambda engine: engine.resume_memory([tag]),
                self._config.timeout_s,
            )
        for member in woken:
            self._register.note_back(member, tag)
        for member, reason in failed.items():
            self._register.fence(member, reason)
        return failed


def _plain(timers: Timers) -> dict[str, float]:
    return {name.removeprefix("time/"): seconds for name, seconds in timers.seconds.items()}


def _add_times(timers: Timers, receipts: dict[Member, list[Receipt]]) -> None:
    """Notes the times of the slowest rank of an engine."""
    ranks = [rank for ranks in receipts.values() for rank in ranks]
    for name, field in (("idle", "idle"), ("received", "wire"), ("load", "load")):
        spent = max((getattr(rank, f"{field}_seconds") for rank in ranks), default=0.0)
        timers.seconds.setdefault(f"time/{name}", spent)


def _paused(timers: Timers) -> float:
    """Returns how long engines stood still: loading is part of the wire, where there is one."""
    spent = _plain(timers)
    parts = ("pause", "prepare", "wire" if "wire" in spent else "load", "resume")
    return sum(spent.get(part, 0.0) for part in parts)
