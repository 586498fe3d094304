"""Policy v becomes v + 1 in every engine: pause in place, deliver, resume.

Rank 0 of the trainer leads, whatever the transport. An engine that fails an update holds undefined
weights: it is fenced (left out, and never resumed) until it comes back with another epoch.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from relax_hpc.comm.broadcast import Transport as Backend
from relax_hpc.comm.bucket import BucketPlan, Spec
from relax_hpc.comm.orders import Receipt
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import EngineError
from relax_hpc.paths import RunPaths
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights import members
from relax_hpc.weights.collective import CollectiveTransport
from relax_hpc.weights.files import FileTransport
from relax_hpc.weights.lanes import LaneLink, LaneTransport
from relax_hpc.weights.members import Member
from relax_hpc.weights.receiver import Receiver
from relax_hpc.weights.roster import Holding, HoldingState, Roster
from relax_hpc.weights.staging import Buffers, Gather, Outgoing
from relax_hpc.weights.transport import HEALTH_S, Transport, each
from relax_hpc.weights.verify import Verified, compare

log = logging.getLogger(__name__)

_BUFFERS = 2
_PAUSED = ("pause", "prepare", "wire", "resume")
"""The parts of an update during which engines stand still."""
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


class Publisher:
    """Lives in rank 0 of the trainer; the other ranks only feed the gather."""

    def __init__(
        self,
        config: WeightsConfig,
        paths: RunPaths,
        ids: Callable[[], Sequence[str]],
        connect: Callable[[Member], Receiver],
        specs: Iterable[Spec],
        *,
        device: torch.device,
        model_folder: Path,
        link: LaneLink | None = None,
        gather: Gather | None = None,
    ) -> None:
        """Serves the members `ids()`, whether or not they are there yet.

        Args:
            config: transport, bucket size, deadlines.
            paths: where members announce themselves.
            ids: members of this run; asked before every update, since engines come and go.
            connect: makes the client of a member.
            specs: of all tensors that a publication streams, in its order.
            device: where these tensors are.
            model_folder: what the `files` transport takes config and tokenizer from.
            link: to members on the trainer's own GPUs, if that is where they are.
            gather: brings buckets of at most `config.bucket_bytes` here, which is quicker than to
                take tensors one by one.
        """
        self._config, self._paths, self._ids = config, paths, ids
        self._connect, self._gather = connect, gather
        plan = BucketPlan.of(specs, config.bucket_bytes)
        self._buffers = link.buffers if link else Buffers(plan, device, count=_BUFFERS)
        self._holdings: dict[Key, Holding] = {}
        self._clients: dict[Key, Receiver] = {}
        self._version = -1
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights")
        self._transport = self._make_transport(model_folder, link)
        self._next_look = 0.0
        last = Roster.read(paths)
        self._interrupted = last is not None and not last.done

    def publish(
        self,
        version: int,
        tensors: Iterator[tuple[str, Tensor]],
        *,
        check: bool = False,
    ) -> Published:
        """Brings every healthy member to `version`.

        Args:
            version: of the policy.
            tensors: all of its weights; taken to the end, unless there is a `gather`.
            check: compares afterwards what members hold with what was sent.
        """
        self._version, timers, start = version, Timers(), time.perf_counter()
        live = self._due(self._live())
        by_name = check and any(
            m.engine == "embedded" and not self._transport.leaves_receipts(m) for m in live
        )
        outgoing = Outgoing(
            self._buffers, tensors, self._gather, digest=by_name, fingerprints=check
        )
        done, receipts = dict[Member, Receiver](), dict[Member, list[Receipt]]()
        try:
            if live:
                done, receipts = self._sync(live, outgoing, timers, check=check)
        finally:
            end = time.perf_counter()
            self._transport.settle()
            outgoing.drain()
        for name, of_receipt in (("idle", "idle"), ("received", "wire"), ("load", "load")):
            ranks = [rank for ranks in receipts.values() for rank in ranks]
            spent = [getattr(rank, f"{of_receipt}_seconds") for rank in ranks]
            timers.seconds[f"time/{name}"] = max(spent, default=0.0)
        fenced = [m.id for m in live if self._holdings[_key(m)].state == "FENCED"]
        return Published(
            version,
            sorted(member.id for member in done),
            sorted(fenced),
            again=len(live) > len(done) + len(fenced),
            num_bytes=self._buffers.plan.num_bytes,
            pause_seconds=sum(timers.seconds.get(f"time/{name}", 0.0) for name in _PAUSED),
            seconds={"total": end - start} | _plain(timers),
            verified=compare(done, outgoing, receipts) if check and done else None,
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
        return not all(self._is_current(member) for member in self._due(self._live()))

    def close(self) -> None:
        self._transport.close()
        self._threads.shutdown(wait=False)

    def _make_transport(self, model_folder: Path, link: LaneLink | None) -> Transport:
        config, paths, threads = self._config, self._paths, self._threads
        if config.transport == "files":
            return FileTransport(config, paths, threads, model_folder=model_folder)
        if link:
            return LaneTransport(link, threads)
        backend: Backend = "nccl" if self._buffers.device.type == "cuda" else "gloo"
        return CollectiveTransport(config, paths, threads, self._buffers.plan, backend)

    def _is_current(self, member: Member) -> bool:
        holding = self._holdings.get(_key(member))
        if holding is None:
            return False
        return holding.state == "FENCED" or holding.version == self._version

    def _live(self) -> dict[Member, Receiver]:
        candidates = {
            member: self._client(member)
            for member in members.read(self._paths, self._ids())
            if (known := self._holdings.get(_key(member))) is None or known.state != "FENCED"
        }
        answers = list(self._threads.map(lambda r: r.health(HEALTH_S), candidates.values()))
        return {m: r for (m, r), ok in zip(candidates.items(), answers, strict=True) if ok}

    def _due(self, live: dict[Member, Receiver]) -> dict[Member, Receiver]:
        """Those that are not ahead of this trainer.

        After a restart from a checkpoint engines hold a policy that this trainer has yet to make
        again. Going back would give their running requests older tokens than `max_staleness`
        allows, so they stay where they are until the trainer has caught up. Not so if the trainer
        before died during an update: what the engines hold then is undefined.
        """
        return {m: r for m, r in live.items() if self._interrupted or self._is_due(m, r)}

    def _is_due(self, member: Member, receiver: Receiver) -> bool:
        if _key(member) in self._holdings:
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
        self, live: dict[Member, Receiver], outgoing: Outgoing, timers: Timers, *, check: bool
    ) -> tuple[dict[Member, Receiver], dict[Member, list[Receipt]]]:
        """Those that hold the version now and go on, and what they answered."""
        self._transport.stage(self._version, outgoing, timers)
        for member in live:
            self._note(member, "SYNCING")
        self._write_roster(done=False)
        taken, failed, receipts = self._transport.deliver(
            live, self._version, outgoing, timers, check=check
        )
        with timers("resume"):
            done, silent = each(
                self._threads, taken, lambda its: its.resume(), self._config.timeout_s
            )
        for member, reason in (failed | silent).items():
            self._fence(member, reason)
        for member in done:
            self._note(member, "ACTIVE")
        self._interrupted = False
        # Those that are to be given it again hold half of it until then.
        self._write_roster(done=all(self._holdings[_key(m)].state != "SYNCING" for m in live))
        return done, receipts

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
