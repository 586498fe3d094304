"""Policy v becomes v + 1 in every engine: pause in place, deliver, resume.

Rank 0 of the trainer leads, whatever the transport. An engine that fails an update holds undefined
weights: it is fenced (left out, and never resumed) until it comes back with another epoch.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from relax_hpc.comm.broadcast import Transport as Backend
from relax_hpc.comm.bucket import BucketPlan, Spec
from relax_hpc.comm.orders import Receipt
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import EngineError, SnapshotError
from relax_hpc.paths import RunPaths
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights import members
from relax_hpc.weights.collective import CollectiveTransport
from relax_hpc.weights.files import FileTransport
from relax_hpc.weights.lanes import LaneLink, LaneTransport
from relax_hpc.weights.members import Member
from relax_hpc.weights.ranks import Rest, TrainerRanks
from relax_hpc.weights.receiver import Receiver
from relax_hpc.weights.roster import Holding, HoldingState, Roster
from relax_hpc.weights.staging import Buffers, Gather, Outgoing
from relax_hpc.weights.transport import HEALTH_S, WAYS, Delivery, Transport, Way, each
from relax_hpc.weights.verify import Verified, compare

log = logging.getLogger(__name__)

_BUFFERS = 2
_RETRY_S = 30.0
"""After a transport was found to be of no use."""
_THREADS = 1024
"""At most; one waits in every engine during an update. They are started when needed."""
Key = tuple[str, str]
"""Id and epoch of a member."""


class Published(NamedTuple):
    """What one publication did."""

    version: int
    members: list[str]
    fenced: list[str]
    again: bool
    """Whether members are left that have to be given it in a further publication."""
    num_bytes: int
    pause_seconds: float
    """How long engines stood still."""
    seconds: dict[str, float]
    """From the first gathered tensor to the last engine that resumed, and the parts of it."""
    verified: Verified | None
    transport: Way | None = None
    """How; None if every engine that is there holds the version."""
    error: str = ""
    """Why no engine could be given it in this way, for the present."""


class Publisher:
    """Lives in rank 0 of the trainer, and tells the other ranks what to do for it."""

    def __init__(
        self,
        config: WeightsConfig,
        paths: RunPaths,
        ids: Callable[[], Sequence[str]],
        connect: Callable[[Member], Receiver],
        specs: Iterable[Spec],
        *,
        device: torch.device,
        ranks: TrainerRanks,
        link: LaneLink | None = None,
        gather: Gather | None = None,
    ) -> None:
        """Serves the members `ids()`, whether or not they are there yet.

        Args:
            config: bucket size, deadlines.
            paths: where members announce themselves.
            ids: members of this run; asked before every update, since engines come and go.
            connect: makes the client of a member.
            specs: of all tensors that a publication streams, in its order.
            device: where these tensors are.
            ranks: of the trainer; the others do what this publisher says.
            link: to members on the trainer's own GPUs, if that is where they are.
            gather: brings buckets of at most `config.bucket_bytes` here, which is quicker than to
                take tensors one by one.
        """
        self._config, self._paths, self._ids = config, paths, ids
        self._connect, self._ranks, self._link, self._gather = connect, ranks, link, gather
        plan = BucketPlan.of(specs, config.bucket_bytes)
        self._buffers = link.buffers if link else Buffers(plan, device, count=_BUFFERS)
        self._holdings: dict[Key, Holding] = {}
        self._clients: dict[Key, Receiver] = {}
        self._version = -1
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights")
        self._transports = dict[Way, Transport]()
        self._failing_since, self._not_before = dict[Way, float](), dict[Way, float]()
        self._next_look = 0.0
        last = Roster.read(paths)
        self._torn = set[Key]()
        """Were being updated when the trainer before died: what they hold is undefined."""
        if last:
            its = last.members.items()
            self._torn = {(name, h.epoch) for name, h in its if h.state == "SYNCING"}

    def publish(
        self,
        version: int,
        tensors: Iterator[tuple[str, Tensor]],
        *,
        check: bool = False,
    ) -> Published:
        """Brings every healthy member that takes weights in one way to `version`.

        If there are members of several ways, it is to be called `again`, for the next of them.

        Args:
            version: of the policy.
            tensors: all of its weights, which nobody has begun to take.
            check: compares afterwards what members hold with what was sent.

        Raises:
            SnapshotError: engines take files only, and none could be written for `timeout_s`.
        """
        self._version, timers, start = version, Timers(), time.perf_counter()
        live = self._due(self._live())
        way = next(iter(self._open(live)), None)
        its = {m: r for m, r in live.items() if self._way_of(m) == way}
        outgoing = self._outgoing(way, its, tensors, check=check)
        done, delivery, error = dict[Member, Receiver](), None, ""
        try:
            if way:
                done, delivery = self._sync(way, its, outgoing, timers, check=check)
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
            _add_times(timers, delivery.receipts)
            if check and done:
                verified = compare(done, delivery.sent, delivery.receipts)
        fenced = [member.id for member in live if self._is_fenced(member)]
        return Published(
            version,
            sorted(member.id for member in done),
            sorted(fenced),
            again=bool(self._open(live)),
            num_bytes=self._buffers.plan.num_bytes,
            pause_seconds=_paused(timers),
            seconds={"total": end - start} | _plain(timers),
            verified=verified,
            transport=way,
            error=error,
        )

    def has_newcomers(self, *, every_s: float = 1.0) -> bool:
        """Whether an engine is there that does not hold the current version.

        Without asking, a restarted engine would wait for the next version, and the trainer for the
        batch that only this engine can sample. Cheap enough to be called often.
        """
        if self._version < 0 or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + every_s
        known = members.read(self._paths, self._ids())
        if all(self._is_current(member) for member in known):
            return False
        return bool(self._open(self._due(self._live())))

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()
        self._threads.shutdown(wait=False)

    def _outgoing(
        self,
        way: Way | None,
        its: Iterable[Member],
        tensors: Iterator[tuple[str, Tensor]],
        *,
        check: bool,
    ) -> Outgoing:
        by_name = check and any(
            member.engine == "embedded" and not self._transport(way).leaves_receipts(member)
            for member in its
            if way
        )
        gather = self._gather if way in ("lanes", "collective") else None
        return Outgoing(self._buffers, tensors, gather, digest=by_name, fingerprints=check)

    def _way_of(self, member: Member) -> Way:
        return "lanes" if self._link and member.lane >= 0 else member.transport

    def _transport(self, way: Way) -> Transport:
        if way not in self._transports:
            self._transports[way] = self._make_transport(way)
        return self._transports[way]

    def _make_transport(self, way: Way) -> Transport:
        config, paths, threads = self._config, self._paths, self._threads
        if way == "files":
            return FileTransport(config, threads, self._ranks)
        if way == "lanes":
            assert self._link
            return LaneTransport(self._link, threads, self._ranks)
        backend: Backend = "nccl" if self._buffers.device.type == "cuda" else "gloo"
        return CollectiveTransport(config, paths, threads, self._ranks, self._buffers.plan, backend)

    def _open(self, live: Iterable[Member]) -> list[Way]:
        """Ways in which somebody is still to be given the version, the quickest first."""
        wanted = {self._way_of(member) for member in live if not self._is_current(member)}
        now = time.monotonic()
        return [way for way in WAYS if way in wanted and now >= self._not_before.get(way, now)]

    def _suspend(self, way: Way, problem: SnapshotError) -> str:
        """Lets a way be for a while; engines that take no other keep what they have.

        Raises:
            SnapshotError: it has failed for long, and no engine is left to sample.
        """
        now = time.monotonic()
        self._not_before[way] = now + _RETRY_S
        since = self._failing_since.setdefault(way, now)
        holds = [h.version for h in self._holdings.values() if h.state == "ACTIVE"]
        if now - since > self._config.timeout_s and self._version not in holds:
            raise problem
        log.error("%s; engines keep what they have; tried again in %.0f s", problem, _RETRY_S)
        return str(problem)

    def _is_fenced(self, member: Member) -> bool:
        holding = self._holdings.get(_key(member))
        return holding is not None and holding.state == "FENCED"

    def _is_current(self, member: Member) -> bool:
        holding = self._holdings.get(_key(member))
        if holding is None:
            return False
        return holding.state == "FENCED" or holding.version == self._version

    def _live(self) -> dict[Member, Receiver]:
        candidates = {
            member: self._client(member)
            for member in members.read(self._paths, self._ids())
            if not self._is_fenced(member)
        }
        answers = list(self._threads.map(lambda r: r.health(HEALTH_S), candidates.values()))
        return {m: r for (m, r), ok in zip(candidates.items(), answers, strict=True) if ok}

    def _due(self, live: dict[Member, Receiver]) -> dict[Member, Receiver]:
        """Those that are not ahead of this trainer.

        After a restart from a checkpoint engines hold a policy that this trainer has yet to make
        again. Going back would give their running requests older tokens than `max_staleness`
        allows, so they stay where they are until the trainer has caught up. Not so if the trainer
        before died while it updated them.
        """
        return {m: r for m, r in live.items() if self._is_due(m, r)}

    def _is_due(self, member: Member, receiver: Receiver) -> bool:
        if _key(member) in self._torn or _key(member) in self._holdings:
            return True
        try:
            return receiver.version() <= self._version
        except EngineError:
            return False  # it died a moment ago

    def _client(self, member: Member) -> Receiver:
        if _key(member) not in self._clients:
            self._clients[_key(member)] = self._connect(member)
        return self._clients[_key(member)]

    def _sync(
        self,
        way: Way,
        its: dict[Member, Receiver],
        outgoing: Outgoing,
        timers: Timers,
        *,
        check: bool,
    ) -> tuple[dict[Member, Receiver], Delivery]:
        """Those that hold the version now and go on, and how it got there."""
        transport = self._transport(way)
        transport.stage(self._version, outgoing, timers)
        self._failing_since.pop(way, None)
        if way == "files":  # each for itself, so those that have it are left alone
            its = {m: r for m, r in its.items() if not self._is_current(m)}
        for member in its:
            self._note(member, "SYNCING")
        self._write_roster(done=False)
        delivery = transport.deliver(its, self._version, outgoing, timers, check=check)
        done, silent = delivery.taken, dict[Member, str]()
        if not delivery.resumed:
            with timers("resume"):
                done, silent = each(
                    self._threads, done, lambda its: its.resume(), self._config.timeout_s
                )
        for member, reason in (delivery.failed | silent).items():
            self._fence(member, reason)
        for member in done:
            self._note(member, "ACTIVE")
        # Those that are to be given it again hold half of it until then.
        self._write_roster(done=all(self._holdings[_key(m)].state != "SYNCING" for m in its))
        return done, delivery

    def _fence(self, member: Member, reason: str) -> None:
        log.error("engine %s is fenced at v%d: %s", member.id, self._version, reason)
        self._note(member, "FENCED", reason)

    def _note(self, member: Member, state: HoldingState, reason: str = "") -> None:
        version = self._version if state == "ACTIVE" else None
        self._holdings[_key(member)] = Holding(member.epoch, version, state, reason)

    def _write_roster(self, *, done: bool) -> None:
        known = set(self._ids())
        newest = {name: h for (name, _), h in self._holdings.items() if name in known}
        Roster(self._version, done, newest).write(self._paths)


def _key(member: Member) -> Key:
    return member.id, member.epoch


def _plain(timers: Timers) -> dict[str, float]:
    return {name.removeprefix("time/"): seconds for name, seconds in timers.seconds.items()}


def _add_times(timers: Timers, receipts: dict[Member, list[Receipt]]) -> None:
    """What the slowest rank of an engine says of its part."""
    ranks = [rank for ranks in receipts.values() for rank in ranks]
    for name, field in (("idle", "idle"), ("received", "wire"), ("load", "load")):
        spent = max((getattr(rank, f"{field}_seconds") for rank in ranks), default=0.0)
        timers.seconds.setdefault(f"time/{name}", spent)


def _paused(timers: Timers) -> float:
    """How long engines stood still: loading is part of the wire, where there is one."""
    spent = _plain(timers)
    parts = ("pause", "prepare", "wire" if "wire" in spent else "load", "resume")
    return sum(spent.get(part, 0.0) for part in parts)
